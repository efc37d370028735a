package secret

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"strings"
	"testing"
)

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// C19 over real connections, HTTP/1.1 and HTTP/2 on both sides: a server that
// echoes what it gets gets the value, and the client sees the placeholder, in the
// header, the body and the trailer.
func TestOverTheWire(t *testing.T) {
	t.Parallel()
	for _, h2 := range []bool{false, true} {
		var got http.Header
		up := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			got = r.Header.Clone()
			user, pass, _ := r.BasicAuth()
			w.Header().Set("Trailer", "X-Trail")
			w.Header().Set("X-Echo", r.Header.Get("X-Key"))
			body := r.Header.Get("X-Key")
			io.WriteString(w, user+" "+pass+" "+body[:7])
			w.(http.Flusher).Flush() // the value in two pieces
			io.WriteString(w, body[7:]+" end")
			w.Header().Set("X-Trail", body)
			w.Header().Set(http.TrailerPrefix+"X-Late", body)
		}))
		up.EnableHTTP2 = h2
		up.StartTLS()
		defer up.Close()

		b, ph := echo(t)
		rp := &httputil.ReverseProxy{
			FlushInterval: -1,
			ErrorLog:      log.New(io.Discard, "", 0),
			Rewrite: func(r *httputil.ProxyRequest) {
				r.Out.URL.Scheme, r.Out.URL.Host = "https", up.Listener.Addr().String()
			},
			Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
				r.Host = host
				if err := b.Request(host, r); err != nil {
					return nil, err
				}
				return up.Client().Transport.RoundTrip(r)
			}),
			ModifyResponse: func(r *http.Response) error { return b.Response(host, r) },
		}
		front := httptest.NewUnstartedServer(rp)
		front.TLS = &tls.Config{GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) { return b.Certificate(h.ServerName) }}
		front.EnableHTTP2 = h2
		front.StartTLS()
		defer front.Close()

		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(b.CA())
		tr := &http.Transport{ForceAttemptHTTP2: h2, TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: host}}
		defer tr.CloseIdleConnections()
		q, err := http.NewRequest("GET", front.URL+"/x", nil)
		if err != nil {
			t.Fatal(err)
		}
		q.Host = host
		q.SetBasicAuth("git", ph)
		q.Header.Set("X-Key", ph)
		r, err := tr.RoundTrip(q)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || (r.ProtoMajor == 2) != h2 {
			t.Fatalf("%v, %s", err, r.Proto)
		}
		if got.Get("X-Key") != theValue || got.Get("Accept-Encoding") != "identity" {
			t.Error("the server did not get the value")
		}
		if string(body) != "git "+ph+" "+ph+" end" || r.Header.Get("X-Echo") != ph || r.Trailer.Get("X-Trail") != ph || r.Trailer.Get("X-Late") != ph {
			t.Errorf("h2 %v: %q, header %q, trailer %v", h2, body, r.Header.Get("X-Echo"), r.Trailer)
		}
		if strings.Contains(string(body), theValue) {
			t.Error("the value came back")
		}
	}
}
