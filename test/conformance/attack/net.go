package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

func init() {
	verbs["try"] = try
	verbs["web"] = web
	verbs["get"] = get
	verbs["dns"] = ask
	verbs["raw"] = raw
	verbs["hold"] = hold
	verbs["relay"] = relay
	verbs["serve"] = serve
	verbs["headers"] = headers
	verbs["abstract"] = abstract
	verbs["flood"] = flood
}

const patience = 2 * time.Second

// how says what became of something: a refusal by the network at once, silence, or
// another error.
func how(err error) string {
	var ne net.Error
	var no syscall.Errno
	switch {
	case err == nil:
		return "reached"
	case errors.As(err, &no):
		return "refused " + unix.ErrnoName(no)
	case errors.As(err, &ne) && ne.Timeout():
		return "silent"
	}
	return "failed " + err.Error()
}

// try sends a token to each of its arguments, "tcp ADDR:PORT" and so on, all at
// once, and says what became of it.
func try(args []string) {
	token := args[0]
	var wg sync.WaitGroup
	var mu sync.Mutex
	sem := make(chan struct{}, 64)
	for _, a := range args[1:] {
		sem <- struct{}{}
		wg.Go(func() {
			defer func() { <-sem }()
			network, addr, _ := strings.Cut(a, " ")
			var err error
			if network == "mapped" {
				err = mapped(addr, token)
			} else {
				err = say(network, addr, token)
			}
			mu.Lock()
			defer mu.Unlock()
			fmt.Println(a, "=", how(err))
		})
	}
	wg.Wait()
}

func say(network, addr, token string) error {
	c, err := net.DialTimeout(network, addr, patience)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, token+"\r\n\r\n"); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 100))
	return err
}

// mapped connects an IPv6 socket to an IPv4-mapped address.
func mapped(addr, token string) error {
	ap := netip.MustParseAddrPort(addr)
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	tv := unix.NsecToTimeval(int64(patience))
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
	if err := unix.Connect(fd, &unix.SockaddrInet6{Port: int(ap.Port()), Addr: ap.Addr().As16()}); err != nil {
		return err
	}
	if _, err := unix.Write(fd, []byte(token+"\r\n\r\n")); err != nil {
		return err
	}
	_, err = unix.Read(fd, make([]byte, 100))
	return err
}

// web makes a request in which everything can differ: the address, the name in
// the handshake, and the one in the request.
func web(args []string) {
	f := flag.NewFlagSet("web", flag.ExitOnError)
	to := f.String("to", "", "address and port")
	sni := f.String("sni", "", "server name")
	host := f.String("host", "", "Host")
	path := f.String("path", "/", "")
	plain := f.Bool("plain", false, "without TLS")
	verify := f.Bool("verify", false, "the certificate")
	h2 := f.Bool("h2", false, "HTTP/2")
	rest := f.String("raw", "", "this instead of a request")
	var headers []string
	f.Func("header", "", func(s string) error { headers = append(headers, s); return nil })
	_ = f.Parse(args)
	dial := func(ctx context.Context, _, addr string) (net.Conn, error) {
		if *to != "" {
			addr = *to
		}
		d := net.Dialer{Timeout: patience}
		return d.DialContext(ctx, "tcp", addr)
	}
	conf := &tls.Config{ServerName: *sni, InsecureSkipVerify: !*verify}
	if *rest != "" {
		c, err := dial(context.Background(), "", "")
		if err == nil && !*plain {
			c = tls.Client(c, conf)
		}
		if err != nil {
			fmt.Println(how(err))
			return
		}
		_ = c.SetDeadline(time.Now().Add(3 * time.Second))
		if _, err := io.WriteString(c, strings.NewReplacer(`\r`, "\r", `\n`, "\n").Replace(*rest)); err != nil {
			fmt.Println(how(err))
			return
		}
		b, err := io.ReadAll(io.LimitReader(c, 64<<10))
		fmt.Printf("%s\n%v\n", b, err)
		return
	}
	tr := &http.Transport{DialContext: dial, TLSClientConfig: conf, ForceAttemptHTTP2: *h2, DisableCompression: true}
	scheme := "https"
	if *plain {
		scheme = "http"
	}
	name := *host
	if name == "" {
		name = *sni
	}
	if name == "" {
		name = *to
	}
	req, err := http.NewRequest("GET", scheme+"://"+name+*path, nil)
	if err != nil {
		fmt.Println(how(err))
		return
	}
	for _, h := range headers {
		k, v, _ := strings.Cut(h, ":")
		req.Header.Add(k, strings.TrimSpace(v))
	}
	c := http.Client{Transport: tr, Timeout: 8 * time.Second}
	res, err := c.Do(req)
	if err != nil {
		fmt.Println("error:", err)
		return
	}
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	fmt.Printf("%d %s\n%v\n%s\n%v\n", res.StatusCode, res.Proto, res.Header, b, err)
}

// get fetches a page, follows redirections, and takes a host for an address the
// way that inet_aton(3) does: URL, then headers.
func get(args []string) {
	d := net.Dialer{Timeout: patience}
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		if a, is := aton(host); is {
			addr = net.JoinHostPort(a.String(), port)
		}
		return d.DialContext(ctx, network, addr)
	}
	c := http.Client{Timeout: 8 * time.Second, Transport: &http.Transport{DialContext: dial, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	req, err := http.NewRequest("GET", args[0], nil)
	if err != nil {
		fmt.Println("error:", err)
		return
	}
	for _, h := range args[1:] {
		k, v, _ := strings.Cut(h, ":")
		if req.Header.Set(k, strings.TrimSpace(v)); k == "Host" {
			req.Host = strings.TrimSpace(v)
		}
	}
	res, err := c.Do(req)
	if err != nil {
		fmt.Println("error:", err)
		return
	}
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	fmt.Printf("%d %s\n%s\n%v\n", res.StatusCode, res.Request.URL, b, err)
}

// aton reads an address in one to four parts, each decimal, octal or hexadecimal.
func aton(s string) (netip.Addr, bool) {
	parts := strings.Split(strings.TrimSuffix(s, "."), ".")
	if len(parts) > 4 {
		return netip.Addr{}, false
	}
	var v uint64
	for i, p := range parts {
		base := 10
		switch {
		case strings.HasPrefix(strings.ToLower(p), "0x"):
			base, p = 16, p[2:]
		case len(p) > 1 && p[0] == '0':
			base = 8
		}
		n, err := strconv.ParseUint(p, base, 32)
		if err != nil {
			return netip.Addr{}, false
		}
		if i < len(parts)-1 {
			if n > 255 {
				return netip.Addr{}, false
			}
			v |= n << (24 - 8*i)
		} else {
			v |= n
		}
	}
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, uint32(v)))), true
}

// ask asks a resolver: NETWORK SERVER NAME TYPE...; NETWORK is udp, tcp, tcp-tls or
// https (a name, as it resolves).
func ask(args []string) {
	network, server := args[0], args[1]
	for i := 2; i+1 < len(args); i += 2 {
		m := new(dns.Msg)
		m.SetQuestion(dns.Fqdn(args[i]), dns.StringToType[args[i+1]])
		m.SetEdns0(1232, false)
		var r *dns.Msg
		var err error
		if network == "https" {
			r, err = overHTTPS(m, server)
		} else {
			c := dns.Client{Net: network, Timeout: 4 * time.Second, TLSConfig: &tls.Config{InsecureSkipVerify: true}}
			r, _, err = c.Exchange(m, server)
		}
		if err != nil {
			fmt.Println(args[i], args[i+1], how(err))
			continue
		}
		fmt.Print(args[i], " ", args[i+1], " ", dns.RcodeToString[r.Rcode])
		for _, rr := range r.Answer {
			fmt.Print(" [", strings.ReplaceAll(rr.String(), "\t", " "), "]")
		}
		fmt.Println()
	}
}

func overHTTPS(m *dns.Msg, host string) (*dns.Msg, error) {
	b, err := m.Pack()
	if err != nil {
		return nil, err
	}
	c := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	res, err := c.Post("https://"+host+"/dns-query", "application/dns-message", bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if b, err = io.ReadAll(res.Body); err != nil {
		return nil, err
	}
	r := new(dns.Msg)
	return r, r.Unpack(b)
}

// hold opens a flow and sends on it for as long as it can: NETWORK ADDR TOKEN [SNI].
func hold(args []string) {
	network, addr := args[0], args[1]
	c, err := net.DialTimeout(network, addr, patience)
	if err == nil && len(args) > 3 {
		t := tls.Client(c, &tls.Config{ServerName: args[3], InsecureSkipVerify: true})
		err = t.Handshake()
		c = t
	}
	if err != nil {
		fmt.Println("ended", err)
		return
	}
	go func() {
		b := make([]byte, 4096)
		for first := true; ; first = false {
			_, err := c.Read(b)
			if err != nil {
				fmt.Println("ended", err)
				os.Exit(0)
			}
			if first {
				fmt.Println("flows")
			}
		}
	}()
	for i := 0; ; i++ {
		if _, err := fmt.Fprintf(c, "%s %d\n", args[2], i); err != nil && network != "udp" {
			fmt.Println("ended", err)
			os.Exit(0)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// relay is a CONNECT proxy inside, and its client: TARGET TOKEN.
func relay(args []string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	go http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		up, err := net.DialTimeout("tcp", r.Host, patience)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		w.WriteHeader(http.StatusOK)
		c, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		go io.Copy(up, rw)
		io.Copy(c, up)
		c.Close()
	}))
	for i := 0; i+1 < len(args); i += 2 {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			fmt.Println(err)
			return
		}
		_ = c.SetDeadline(time.Now().Add(2 * patience))
		fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", args[i], args[i])
		r := bufio.NewReader(c)
		res, err := http.ReadResponse(r, &http.Request{Method: "CONNECT"})
		if err != nil || res.StatusCode != http.StatusOK {
			fmt.Println(args[i], "= no tunnel", err)
			continue
		}
		fmt.Fprintf(c, "%s\r\n\r\n", args[i+1])
		_, err = r.ReadByte()
		fmt.Println(args[i], "=", how(err))
	}
}

// serve says on its ports who came, and answers.
func serve(args []string) {
	for _, port := range args {
		ln, err := net.Listen("tcp", ":"+port)
		if err != nil {
			fmt.Println(err)
			return
		}
		pc, err := net.ListenPacket("udp", ":"+port)
		if err != nil {
			fmt.Println(err)
			return
		}
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				fmt.Println("CAME", "tcp", c.RemoteAddr())
				go func() {
					defer c.Close()
					fmt.Fprintf(c, "HTTP/1.0 200 OK\r\n\r\ninside\n")
					_, _ = io.Copy(io.Discard, c)
				}()
			}
		}()
		go func() {
			b := make([]byte, 2048)
			for {
				n, from, err := pc.ReadFrom(b)
				if err != nil {
					return
				}
				fmt.Println("CAME", "udp", from)
				_, _ = pc.WriteTo(b[:n], from)
			}
		}()
	}
	fmt.Println("serving")
	select {}
}

// headers serves HTTP on a port and prints all that it is asked.
func headers(args []string) {
	ln, err := net.Listen("tcp", ":"+args[0])
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("serving")
	_ = http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Println("REQUEST", r.Host, r.URL.RequestURI(), r.Header, "END")
		fmt.Fprintln(w, "inside")
	}))
}

// abstract connects to abstract sockets by name, and lists those that it sees.
func abstract(args []string) {
	for _, a := range args {
		c, err := net.DialTimeout("unix", "@"+a, patience)
		fmt.Println(a, "=", how(err))
		if err == nil {
			c.Close()
		}
	}
	b, _ := os.ReadFile("/proc/net/unix")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 7 && f[7][0] == '@' {
			fmt.Println("SEEN", f[7])
		}
	}
}

// flood: KIND TARGET COUNT.
func flood(args []string) {
	kind, target, n := args[0], args[1], number(args, 2)
	var l unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &l)
	l.Cur = l.Max
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &l)
	var conns []net.Conn
	var mu sync.Mutex
	work := make(chan int)
	var wg sync.WaitGroup
	refused := 0
	for range 32 {
		wg.Go(func() {
			for i := range work {
				var c net.Conn
				var err error
				switch kind {
				case "tcp": // flows that stay
					c, err = net.DialTimeout("tcp", target, 300*time.Millisecond)
				case "udp":
					if c, err = net.Dial("udp", target); err == nil {
						_, err = c.Write([]byte("flood"))
					}
				case "places": // destinations without number
					a := netip.MustParseAddr(target).As4()
					a[2], a[3] = byte(i>>8), byte(i)
					if c, err = net.Dial("udp", net.JoinHostPort(netip.AddrFrom4(a).String(), "9")); err == nil {
						_, err = c.Write([]byte("flood"))
						c.Close()
						c = nil
					}
				case "dns": // names without number, no answers awaited
					if c, err = net.Dial("udp", target); err == nil {
						for k := range 16 {
							m := new(dns.Msg)
							m.SetQuestion(fmt.Sprintf("flood-%d-%d.example.", i, k), dns.TypeA)
							b, _ := m.Pack()
							_, err = c.Write(b)
						}
						c.Close()
						c = nil
					}
				}
				mu.Lock()
				if err != nil {
					refused++
				}
				if c != nil {
					conns = append(conns, c)
				}
				mu.Unlock()
			}
		})
	}
	for i := range n {
		work <- i
		if i == n/10 {
			fmt.Println("flooding")
		}
	}
	close(work)
	wg.Wait()
	fmt.Println("made", len(conns), "refused", refused)
	if len(args) > 3 {
		_, _ = io.Copy(io.Discard, os.Stdin)
	}
}
