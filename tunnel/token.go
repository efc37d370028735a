package tunnel

import (
	"crypto/aes"
	"crypto/cipher"
	"encoding/base64"
	"encoding/binary"
	"net/http"
	"net/url"
	"strings"
	"time"

	"vivarium/sandbox"
)

// MaxMetadata bounds what a connect token hands on, in bytes.
const MaxMetadata = 512

const maxToken = 2048 // characters

// tokens makes and reads connect tokens. A token is sealed (AES-256-GCM) with a
// key that only this node has, for one tunnel: when that is closed no token of it
// opens anything, since no other tunnel ever has its id. Nothing of it is stored,
// and whoever holds it cannot read what it carries.
type tokens struct {
	aead cipher.AEAD
	now  func() time.Time
}

func newTokens(key []byte) (*tokens, error) {
	b, err := aes.NewCipher(key)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make cipher of tokens: %w", err)
	}
	a, err := cipher.NewGCMWithRandomNonce(b)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make cipher of tokens: %w", err)
	}
	return &tokens{aead: a, now: time.Now}, nil
}

// ticket is what a token says.
type ticket struct {
	expires time.Time
	user    string // metadata
}

// seal makes a token for a tunnel.
func (t *tokens) seal(tunnelID string, k ticket) string {
	plain := binary.BigEndian.AppendUint64(nil, uint64(k.expires.Unix()))
	plain = append(plain, k.user...)
	return TokenPrefix + base64.RawURLEncoding.EncodeToString(t.aead.Seal(nil, nil, plain, []byte(tunnelID)))
}

// open reads a token for a tunnel; false if it is not one, or is too old. The
// comparison of the tag takes constant time (crypto/cipher).
func (t *tokens) open(tunnelID, token string) (ticket, bool) {
	body, ok := strings.CutPrefix(token, TokenPrefix)
	if !ok || len(token) > maxToken {
		return ticket{}, false
	}
	sealed, err := base64.RawURLEncoding.Strict().DecodeString(body)
	if err != nil {
		return ticket{}, false
	}
	plain, err := t.aead.Open(nil, nil, sealed, []byte(tunnelID))
	if err != nil || len(plain) < 8 {
		return ticket{}, false
	}
	k := ticket{expires: time.Unix(int64(binary.BigEndian.Uint64(plain)), 0), user: string(plain[8:])}
	if !t.now().Before(k.expires) {
		return ticket{}, false
	}
	return k, true
}

// checkMetadata holds metadata to what a header can carry as it is.
func checkMetadata(s string) error {
	if len(s) > MaxMetadata {
		return sandbox.Invalid.Errorf("metadata of %d bytes: at most %d", len(s), MaxMetadata)
	}
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return sandbox.Invalid.Errorf("metadata has a byte that is not printable ASCII").WithHint("encode it, such as in base64 or as JSON with \\u escapes")
		}
	}
	if strings.TrimSpace(s) != s {
		return sandbox.Invalid.Errorf("metadata begins or ends with a space, which a header would lose")
	}
	return nil
}

// presented says how a valid token came.
type presented int

const (
	byNone presented = iota
	byBearer
	byQuery
	byCookie
)

// authenticate finds a valid token in a request to a tunnel: as bearer, in the
// query, or as cookie.
func (t *tokens) authenticate(tunnelID string, r *http.Request) (string, ticket, presented) {
	for _, v := range r.Header["Authorization"] {
		s := bearer(v)
		if k, ok := t.open(tunnelID, s); ok {
			return s, k, byBearer
		}
	}
	for _, s := range params(r.URL.RawQuery) {
		if k, ok := t.open(tunnelID, s); ok {
			return s, k, byQuery
		}
	}
	if ownPage(r) {
		for _, s := range cookies(r.Header) {
			if k, ok := t.open(tunnelID, s); ok {
				return s, k, byCookie
			}
		}
	}
	return "", ticket{}, byNone
}

// ownPage says whether a request that a browser sends with our cookie was made by
// a page of the tunnel itself, or by its user. SameSite does not tell that alone:
// to a browser every tunnel of the domain is of the same site, unless the domain is
// on its list of public suffixes.
func ownPage(r *http.Request) bool {
	if o := r.Header.Get("Origin"); o != "" {
		u, err := url.Parse(o)
		if err != nil || u.Scheme != "https" || !strings.EqualFold(u.Host, r.Host) {
			return false
		}
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "none", "same-origin":
		return true
	}
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) &&
		r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
}

// remember answers a request whose token was in its query: the cookie from now
// on, and the same address without it, so that it is in no history, bookmark or
// Referer.
func (t *tokens) remember(w http.ResponseWriter, r *http.Request, host, token string, k ticket) {
	http.SetCookie(w, &http.Cookie{
		Name: CookieName, Value: token, Path: "/", MaxAge: max(1, int(k.expires.Sub(t.now()).Seconds())),
		Secure: true, HttpOnly: true, SameSite: http.SameSiteLaxMode,
	})
	// with the host: a path of //other would else lead there
	u := url.URL{Scheme: "https", Host: host, Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: dropParam(r.URL.RawQuery)}
	h := w.Header()
	h.Set("Location", u.String())
	h.Set("Cache-Control", "no-store")
	h.Set("Referrer-Policy", "no-referrer")
	w.WriteHeader(http.StatusFound)
}
