package secret

import (
	"bytes"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"unicode/utf16"

	"golang.org/x/crypto/cryptobyte"
	der "golang.org/x/crypto/cryptobyte/asn1"
)

// PKCS #12 (RFC 7292) without passwords, the form of Java's cacerts since 18: no
// MAC, and certificates that are not encrypted. One with a password cannot be a
// default trust store, for nobody says the password, so none is handled.
var (
	oidData     = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 1}
	oidCertBag  = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 12, 10, 1, 3}
	oidX509     = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 22, 1}
	oidFriendly = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 20}
	oidTrusted  = asn1.ObjectIdentifier{2, 16, 840, 1, 113894, 746875, 1, 1} // Java's: it is a CA to trust
	oidAnyUsage = asn1.ObjectIdentifier{2, 5, 29, 37, 0}
)

// maxContents bounds the parts of a file. Java writes one.
const maxContents = 1000

var explicit = der.Tag(0).ContextSpecific().Constructed()

func isPKCS12(b []byte) bool {
	s := cryptobyte.String(b)
	var pfx cryptobyte.String
	var version int
	return s.ReadASN1(&pfx, der.SEQUENCE) && s.Empty() && pfx.ReadASN1Integer(&version) && version == 3
}

// editPKCS12 removes our part and, if there is a certificate, adds it.
func editPKCS12(b, cert []byte) ([]byte, error) {
	s := cryptobyte.String(b)
	var pfx, info, body, octets, parts cryptobyte.String
	var version int
	var kind asn1.ObjectIdentifier
	if !s.ReadASN1(&pfx, der.SEQUENCE) || !s.Empty() || !pfx.ReadASN1Integer(&version) || version != 3 ||
		!pfx.ReadASN1(&info, der.SEQUENCE) || !info.ReadASN1ObjectIdentifier(&kind) || !kind.Equal(oidData) ||
		!info.ReadASN1(&body, explicit) || !body.ReadASN1(&octets, der.OCTET_STRING) || !octets.ReadASN1(&parts, der.SEQUENCE) {
		return nil, errKeystore
	}
	if !pfx.Empty() {
		return nil, errors.New("a keystore with a password")
	}
	var kept [][]byte
	for !parts.Empty() {
		var part cryptobyte.String
		if len(kept) == maxContents || !parts.ReadASN1Element(&part, der.SEQUENCE) {
			return nil, errKeystore
		}
		if !oursPKCS12(part) {
			kept = append(kept, part)
		}
	}
	if cert != nil {
		part, err := partPKCS12(cert)
		if err != nil {
			return nil, err
		}
		kept = append(kept, part)
	}
	var out cryptobyte.Builder
	out.AddASN1(der.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1Int64(3)
		addData(b, func(b *cryptobyte.Builder) {
			b.AddASN1(der.SEQUENCE, func(b *cryptobyte.Builder) {
				for _, k := range kept {
					b.AddBytes(k)
				}
			})
		})
	})
	return out.Bytes()
}

// addData adds a ContentInfo of plain data.
func addData(b *cryptobyte.Builder, content func(*cryptobyte.Builder)) {
	b.AddASN1(der.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1ObjectIdentifier(oidData)
		b.AddASN1(explicit, func(b *cryptobyte.Builder) { b.AddASN1(der.OCTET_STRING, content) })
	})
}

// friendly is our alias as an attribute has it.
func friendly() []byte {
	var b []byte
	for _, u := range utf16.Encode([]rune(alias)) {
		b = binary.BigEndian.AppendUint16(b, u)
	}
	return b
}

// partPKCS12 is a part with one certificate, which Java trusts as a CA.
func partPKCS12(cert []byte) ([]byte, error) {
	var b cryptobyte.Builder
	attr := func(b *cryptobyte.Builder, oid asn1.ObjectIdentifier, value func(*cryptobyte.Builder)) {
		b.AddASN1(der.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddASN1ObjectIdentifier(oid)
			b.AddASN1(der.SET, value)
		})
	}
	addData(&b, func(b *cryptobyte.Builder) {
		b.AddASN1(der.SEQUENCE, func(b *cryptobyte.Builder) { // SafeContents
			b.AddASN1(der.SEQUENCE, func(b *cryptobyte.Builder) { // SafeBag
				b.AddASN1ObjectIdentifier(oidCertBag)
				b.AddASN1(explicit, func(b *cryptobyte.Builder) {
					b.AddASN1(der.SEQUENCE, func(b *cryptobyte.Builder) {
						b.AddASN1ObjectIdentifier(oidX509)
						b.AddASN1(explicit, func(b *cryptobyte.Builder) { b.AddASN1OctetString(cert) })
					})
				})
				b.AddASN1(der.SET, func(b *cryptobyte.Builder) {
					attr(b, oidFriendly, func(b *cryptobyte.Builder) {
						b.AddASN1(der.Tag(30), func(b *cryptobyte.Builder) { b.AddBytes(friendly()) }) // BMPString
					})
					attr(b, oidTrusted, func(b *cryptobyte.Builder) { b.AddASN1ObjectIdentifier(oidAnyUsage) })
				})
			})
		})
	})
	return b.Bytes()
}

// oursPKCS12 says whether a part is what partPKCS12 makes: one small bag with our
// alias.
func oursPKCS12(part []byte) bool {
	if len(part) > 128<<10 {
		return false
	}
	s := cryptobyte.String(part)
	var info, body, octets, bags, bag cryptobyte.String
	var kind asn1.ObjectIdentifier
	return s.ReadASN1(&info, der.SEQUENCE) && info.ReadASN1ObjectIdentifier(&kind) && kind.Equal(oidData) &&
		info.ReadASN1(&body, explicit) && body.ReadASN1(&octets, der.OCTET_STRING) &&
		octets.ReadASN1(&bags, der.SEQUENCE) && bags.ReadASN1(&bag, der.SEQUENCE) && bags.Empty() &&
		bytes.Contains(bag, append([]byte{30, byte(2 * len(alias))}, friendly()...))
}
