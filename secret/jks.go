package secret

import (
	"bytes"
	"crypto/sha1"
	"encoding/binary"
	"errors"
	"time"
	"unicode/utf16"

	"golang.org/x/crypto/cryptobyte"
)

// JKS, as sun.security.provider.JavaKeyStore (OpenJDK) reads and writes it: a
// magic number, a version, a number of entries, the entries, and SHA-1 over the
// password, a salt and all that. It was the form of Java's cacerts up to 17, and is
// Debian's still.
var jksMagic = []byte{0xfe, 0xed, 0xfe, 0xed}

const (
	jksKey, jksCert = 1, 2
	// jksPassword is what every cacerts has (keytool's documentation). With another
	// the file was made by somebody who knows why.
	jksPassword = "changeit"
	jksSalt     = "Mighty Aphrodite"
)

func jksSum(b []byte) []byte {
	h := sha1.New()
	for _, u := range utf16.Encode([]rune(jksPassword)) {
		h.Write(binary.BigEndian.AppendUint16(nil, u))
	}
	h.Write([]byte(jksSalt))
	h.Write(b)
	return h.Sum(nil)
}

// editJKS removes our entry and, if there is a certificate, adds it.
func editJKS(b, cert []byte) ([]byte, error) {
	if len(b) < 12+sha1.Size {
		return nil, errKeystore
	}
	body, sum := b[:len(b)-sha1.Size], b[len(b)-sha1.Size:]
	if !bytes.Equal(jksSum(body), sum) {
		return nil, errors.New("a keystore with a password of its own, or a damaged one")
	}
	version := binary.BigEndian.Uint32(b[4:])
	if version != 2 {
		return nil, errKeystore
	}
	count := binary.BigEndian.Uint32(b[8:])
	s := cryptobyte.String(body[12:])
	out := append([]byte(nil), body[:12]...)
	kept := uint32(0)
	for range count { // ends with s at the latest: an entry is never empty
		start := s
		name, err := jksEntry(&s)
		if err != nil {
			return nil, err
		}
		if name != alias {
			out = append(out, start[:len(start)-len(s)]...)
			kept++
		}
	}
	if !s.Empty() {
		return nil, errKeystore
	}
	if cert != nil {
		var e cryptobyte.Builder
		e.AddUint32(jksCert)
		e.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes([]byte(alias)) })
		e.AddUint64(uint64(time.Now().UnixMilli()))
		e.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes([]byte("X.509")) })
		e.AddUint32(uint32(len(cert)))
		e.AddBytes(cert)
		entry, err := e.Bytes()
		if err != nil {
			return nil, err
		}
		out = append(out, entry...)
		kept++
	}
	binary.BigEndian.PutUint32(out[8:], kept)
	return append(out, jksSum(out)...), nil
}

// jksEntry reads over an entry and returns its alias.
func jksEntry(s *cryptobyte.String) (string, error) {
	var tag, n uint32
	var date uint64
	var name cryptobyte.String
	if !s.ReadUint32(&tag) || !s.ReadUint16LengthPrefixed(&name) || !s.ReadUint64(&date) {
		return "", errKeystore
	}
	certs := uint32(1)
	switch tag {
	case jksCert:
	case jksKey:
		if !s.ReadUint32(&n) || n > uint32(len(*s)) || !s.Skip(int(n)) || !s.ReadUint32(&certs) {
			return "", errKeystore
		}
	default:
		return "", errKeystore
	}
	for range certs { // each takes at least 6 bytes, or fails
		var kind cryptobyte.String
		if !s.ReadUint16LengthPrefixed(&kind) || !s.ReadUint32(&n) || n > uint32(len(*s)) || !s.Skip(int(n)) {
			return "", errKeystore
		}
	}
	return string(name), nil
}
