package network

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	"vivarium/sandbox"
)

// Mode is the kind of a policy. Its text is also the name of the chain in the
// router's table that carries it out.
type Mode string

const (
	// None lets nothing pass, not even DNS. It is the zero value's meaning.
	None Mode = "none"
	// Public lets TCP, UDP and ICMP echo pass to every public IPv4 address and
	// to the operator's grants, and DNS to our server.
	Public Mode = "public"
)

// opens says whether anything at all passes under m.
func (m Mode) opens() bool { return m == Public }

// Policy is what a slot may reach. More fields are to come; a slot's policy is
// always replaced whole.
type Policy struct {
	Mode Mode `json:"mode"`
}

func (p *Policy) check() error {
	switch p.Mode {
	case "":
		p.Mode = None
	case None, Public:
	default:
		return sandbox.Invalid.Errorf("network: policy %q: want %q or %q", p.Mode, Public, None)
	}
	return nil
}

// Applied tells what is in force for a slot.
type Applied struct {
	Policy Policy
	// Hash is the SHA-256, in hex, of the policy together with everything that
	// the operator's configuration adds to it. Equal hashes mean equal reach.
	Hash string
}

func (n *Network) applied(p Policy) Applied {
	v := struct {
		Version int
		Policy  Policy
		Special any
		Grants  []Grant
		Deny    any
	}{1, p, special, n.opts.Grants, n.opts.Deny}
	if !p.Mode.opens() {
		v.Special, v.Grants, v.Deny = nil, nil, nil
	}
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain data always marshals
	}
	sum := sha256.Sum256(b)
	return Applied{Policy: p, Hash: hex.EncodeToString(sum[:])}
}
