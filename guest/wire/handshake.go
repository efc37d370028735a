package wire

import (
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"
)

// Version is the version of the protocol. The guest and the daemon come from
// one build; a sandbox that outlives an upgrade keeps its older guest, so the
// host must go on speaking every version it has shipped.
const Version = 1

// KeySize is the size of the per-sandbox key in bytes.
const KeySize = 32

const (
	nonceSize = 32
	macSize   = sha256.Size
	helloSize = 4 + 1 + nonceSize
	replySize = helloSize + macSize
)

var magic = [4]byte{'V', 'I', 'V', 'G'}

// ErrAuth is returned when the other side does not know the key.
var ErrAuth = errors.New("the other side does not know the key of this sandbox")

// ErrVersion is returned when the other side speaks another version, or is not
// a guest at all.
var ErrVersion = errors.New("the other side speaks another protocol")

// The handshake, with both sides' proofs over both nonces under different
// labels, so that neither can be reflected or used again:
//
//	host  → guest  magic, version, nonce
//	guest → host   magic, version, nonce, MAC("guest")
//	host  → guest  MAC("host"), and at once the first frame
//
// The host sends nothing of value before the guest has proved itself, and does
// not wait after its own proof: one round trip.
func mac(key []byte, label string, host, guest []byte) []byte {
	m := hmac.New(sha256.New, key)
	m.Write([]byte("vivarium guest handshake "))
	m.Write([]byte{Version})
	m.Write([]byte(label))
	m.Write(host)
	m.Write(guest)
	return m.Sum(nil)
}

func hello(nonce []byte) []byte {
	b := make([]byte, 0, replySize)
	b = append(b, magic[:]...)
	b = append(b, Version)
	return append(b, nonce...)
}

func checkHello(b []byte) error {
	if [4]byte(b[:4]) != magic {
		return ErrVersion
	}
	if b[4] != Version {
		return fmt.Errorf("%w (version %d, ours is %d)", ErrVersion, b[4], Version)
	}
	return nil
}

// HostHandshake proves the key to the guest and has it proved. The caller
// bounds the time with a deadline on rw. It reads not a byte too many.
func HostHandshake(rw io.ReadWriter, key []byte) error {
	if len(key) != KeySize {
		return fmt.Errorf("key of %d bytes, want %d", len(key), KeySize)
	}
	nonce := make([]byte, nonceSize)
	Random(nonce)
	if _, err := rw.Write(hello(nonce)); err != nil {
		return fmt.Errorf("send greeting: %w", err)
	}
	b := make([]byte, replySize)
	if _, err := io.ReadFull(rw, b); err != nil {
		return fmt.Errorf("read greeting: %w", err)
	}
	if err := checkHello(b); err != nil {
		return err
	}
	theirs := b[5 : 5+nonceSize]
	if !hmac.Equal(b[helloSize:], mac(key, "guest", nonce, theirs)) {
		return ErrAuth
	}
	if _, err := rw.Write(mac(key, "host", nonce, theirs)); err != nil {
		return fmt.Errorf("send proof: %w", err)
	}
	return nil
}

// GuestHandshake is the guest's side of HostHandshake.
func GuestHandshake(rw io.ReadWriter, key []byte) error {
	b := make([]byte, helloSize)
	if _, err := io.ReadFull(rw, b); err != nil {
		return fmt.Errorf("read greeting: %w", err)
	}
	if err := checkHello(b); err != nil {
		return err
	}
	theirs := b[5:]
	nonce := make([]byte, nonceSize)
	Random(nonce)
	if _, err := rw.Write(append(hello(nonce), mac(key, "guest", theirs, nonce)...)); err != nil {
		return fmt.Errorf("send greeting: %w", err)
	}
	proof := make([]byte, macSize)
	if _, err := io.ReadFull(rw, proof); err != nil {
		return fmt.Errorf("read proof: %w", err)
	}
	if !hmac.Equal(proof, mac(key, "host", theirs, nonce)) {
		return ErrAuth
	}
	return nil
}

// Mask hides a new key that replaces key, or reveals it again: on the way it
// could be seen by a process that listens on the loopback interface.
func Mask(key, nonce, v []byte) []byte {
	m := hmac.New(sha256.New, key)
	m.Write([]byte("vivarium guest new key"))
	m.Write(nonce)
	pad := m.Sum(nil)
	out := make([]byte, len(v))
	for i := range min(len(v), len(pad)) {
		out[i] = v[i] ^ pad[i]
	}
	return out
}

// Random fills b from the kernel. It is here so that the guest does without
// crypto/rand, which costs it time at the start.
func Random(b []byte) {
	for len(b) > 0 {
		n, err := unix.Getrandom(b, 0)
		if err != nil && err != unix.EINTR {
			panic("getrandom: " + err.Error()) // as crypto/rand does: never go on with what is guessable
		}
		b = b[max(n, 0):]
	}
}
