package secret

import (
	"bytes"
	"errors"
)

// alias is the CA's name in a Java keystore.
const alias = "vivarium"

var errKeystore = errors.New("not a keystore of a known form")

func isKeystore(b []byte) bool {
	return bytes.HasPrefix(b, jksMagic) || isPKCS12(b)
}

// addToKeystore puts a certificate into a Java keystore, JKS or PKCS #12, in place
// of one that is there. Everything else in it stays, byte for byte.
func addToKeystore(b, cert []byte) ([]byte, error) {
	if bytes.HasPrefix(b, jksMagic) {
		return editJKS(b, cert)
	}
	return editPKCS12(b, cert)
}

// stripKeystore undoes it.
func stripKeystore(b []byte) ([]byte, error) {
	if bytes.HasPrefix(b, jksMagic) {
		return editJKS(b, nil)
	}
	return editPKCS12(b, nil)
}
