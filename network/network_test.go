package network

import (
	"bufio"
	"testing"
	"time"

	"github.com/miekg/dns"

	"vivarium/sandbox"
)

func TestPublicReachesTheInternet(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	web := l.internet.serve(t, "8.8.8.8:80")
	l.private.resolver(t, "10.0.0.53:53", func(q dns.Question, m *dns.Msg) {
		rr, _ := dns.NewRR(q.Name + " 60 IN A 8.8.8.8")
		m.Answer = append(m.Answer, rr)
	})
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	c, err := in.dial("tcp", "8.8.8.8:80", 5*time.Second)
	must(t, err)
	defer c.Close()
	line, err := bufio.NewReader(c).ReadString('\n')
	must(t, err)
	if want := "5.5.5.2:"; len(line) < len(want) || line[:len(want)] != want {
		t.Errorf("server saw %q, want the host's address", line)
	}
	if web.hits() != 1 {
		t.Errorf("%d connections at the server", web.hits())
	}
	for _, network := range []string{"udp", "tcp"} {
		r, err := in.lookup(s, network, "www.example.", dns.TypeA)
		must(t, err)
		if len(r.Answer) != 1 {
			t.Errorf("%s: %v", network, r)
		}
	}
}
