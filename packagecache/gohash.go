package packagecache

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// Limits of the go command for a module's zip, beyond which it takes none.
const (
	maxZip      = 500 << 20
	maxUnzipped = 500 << 20
	maxZipFiles = 200_000
)

// checkMod looks at a go.mod file; want is its h1: hash or "".
func checkMod(f *os.File, size int64, want string) (string, error) {
	b := make([]byte, size)
	if _, err := f.ReadAt(b, 0); err != nil && size > 0 {
		return "", err
	}
	if !bytes.Contains(b, []byte("module")) {
		return "", errors.New("it is not a go.mod file")
	}
	if want == "" {
		return "", nil
	}
	if got := hash1([]string{"go.mod"}, [][]byte{sum256(b)}); got != want {
		return "", fmt.Errorf("it is %s, not %s", got, want)
	}
	return "h1", nil
}

func sum256(b []byte) []byte {
	s := sha256.Sum256(b)
	return s[:]
}

// checkZip looks at a module's zip; want is its h1: hash or "".
func checkZip(f *os.File, size int64, want string) (string, error) {
	head := make([]byte, 4)
	if _, err := f.ReadAt(head, 0); err != nil || string(head) != "PK\x03\x04" && string(head) != "PK\x05\x06" {
		return "", errors.New("it is not a zip file")
	}
	if want == "" || size > maxZip {
		return "", nil
	}
	z, err := zip.NewReader(f, size)
	if err != nil {
		return "", err
	}
	if len(z.File) > maxZipFiles {
		return "", errors.New("it has too many files")
	}
	slices.SortFunc(z.File, func(a, b *zip.File) int { return strings.Compare(a.Name, b.Name) })
	var names []string
	var sums [][]byte
	left := int64(maxUnzipped)
	for _, e := range z.File {
		if strings.Contains(e.Name, "\n") {
			return "", errors.New("it has a name with a line break")
		}
		r, err := e.Open()
		if err != nil {
			return "", err
		}
		h := sha256.New()
		n, err := io.Copy(h, io.LimitReader(r, left+1))
		_ = r.Close()
		if err != nil {
			return "", err
		}
		if left -= n; left < 0 {
			return "", errors.New("it unpacks to more than a module may have")
		}
		names, sums = append(names, e.Name), append(sums, h.Sum(nil))
	}
	if got := hash1(names, sums); got != want {
		return "", fmt.Errorf("it is %s, not %s", got, want)
	}
	return "h1", nil
}

// hash1 is the h1: hash of files in the order of their names
// (go.dev/ref/mod#go-sum-files): of the lines that sha256sum prints of them.
func hash1(names []string, sums [][]byte) string {
	h := sha256.New()
	for i, n := range names {
		_, _ = fmt.Fprintf(h, "%x  %s\n", sums[i], n)
	}
	return "h1:" + base64.StdEncoding.EncodeToString(h.Sum(nil))
}
