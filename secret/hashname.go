package secret

import (
	"crypto/sha1"
	"crypto/x509"
	"encoding/asn1"
	"encoding/binary"
	"fmt"
	"strings"

	"vivarium/sandbox"
)

// hashName is the name by which OpenSSL finds a CA in a folder (openssl-rehash(1)):
// SHA-1 over the subject in a canonical encoding, of which the first four bytes
// count, and a number for subjects that hash alike; ours have random names, so
// that is 0. Only subjects that are one common name in ASCII are known, as ours.
func hashName(der []byte) (string, error) {
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return "", sandbox.Internal.Errorf("read a CA: %w", err)
	}
	if len(cert.Subject.Names) != 1 || cert.Subject.CommonName == "" {
		return "", sandbox.Unsupported.Errorf("hash of a subject that is not just a common name")
	}
	// x509_name_canon: lower case, spaces joined, UTF8String, without the outer SEQUENCE
	text := strings.ToLower(strings.Join(strings.Fields(cert.Subject.CommonName), " "))
	attr := struct {
		Type  asn1.ObjectIdentifier
		Value string `asn1:"utf8"`
	}{asn1.ObjectIdentifier{2, 5, 4, 3}, text}
	inner, err := asn1.Marshal(attr)
	if err != nil {
		return "", sandbox.Internal.Errorf("encode a subject: %w", err)
	}
	set, err := asn1.Marshal(asn1.RawValue{Tag: asn1.TagSet, IsCompound: true, Bytes: inner})
	if err != nil {
		return "", sandbox.Internal.Errorf("encode a subject: %w", err)
	}
	sum := sha1.Sum(set)
	return fmt.Sprintf("%08x.0", binary.LittleEndian.Uint32(sum[:])), nil
}
