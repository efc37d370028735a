package secret

import (
	"bytes"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/crypto/nacl/secretbox"

	"vivarium/sandbox"
)

// KeyFile is the name of the key's file in the data directory.
const KeyFile = "secret.key"

// keyHead begins the file, so that nobody takes it for something else.
const keyHead = "vivarium-secret-key-1 "

const (
	keySize   = 32
	nonceSize = 24
)

// key seals and opens rows. It is in memory for as long as the daemon runs.
type key struct{ v Value }

// at derives the key of one place: the parts are joined with their lengths, so
// that no two lists of parts are the same place.
func (k key) at(parts ...[]byte) (*[keySize]byte, error) {
	info := []byte("vivarium/secret/1")
	for _, p := range parts {
		info = binary.BigEndian.AppendUint64(info, uint64(len(p)))
		info = append(info, p...)
	}
	b, err := hkdf.Key(sha256.New, k.v.bytes(), nil, string(info), keySize)
	if err != nil {
		return nil, sandbox.Internal.Errorf("derive key: %w", err)
	}
	return (*[keySize]byte)(b), nil
}

// seal encrypts plain for a place; open undoes it for that place only.
func (k key) seal(plain []byte, place ...[]byte) ([]byte, error) {
	sub, err := k.at(place...)
	if err != nil {
		return nil, err
	}
	defer clear(sub[:])
	var nonce [nonceSize]byte
	rand.Read(nonce[:]) // never fails
	return secretbox.Seal(nonce[:], plain, &nonce, sub), nil
}

// errSealed says that a row is not one that was written there with this key.
var errSealed = errors.New("it was not written in this place with this key")

func (k key) open(sealed []byte, place ...[]byte) ([]byte, error) {
	sub, err := k.at(place...)
	if err != nil {
		return nil, err
	}
	defer clear(sub[:])
	if len(sealed) < nonceSize+secretbox.Overhead {
		return nil, errSealed
	}
	plain, ok := secretbox.Open(nil, sealed[nonceSize:], (*[nonceSize]byte)(sealed), sub)
	if !ok {
		return nil, errSealed
	}
	return plain, nil
}

// readKey reads DIR/secret.key. fs.ErrNotExist is in the chain if there is none.
func readKey(dir string) (key, error) {
	path := filepath.Join(dir, KeyFile)
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return key{}, sandbox.Internal.Errorf("open key of secrets: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return key{}, sandbox.Internal.Errorf("open key of secrets: %w", err)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !fi.Mode().IsRegular() || fi.Mode().Perm()&0o077 != 0 || ok && int(st.Uid) != os.Geteuid() {
		return key{}, sandbox.Denied.Errorf("%s has mode %s: it must be a file that only the daemon's user can read", path, fi.Mode()).
			WithHint("chown it to that user and chmod 600 %s; if others could read it, set the secrets anew with other values", path)
	}
	raw, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return key{}, sandbox.Internal.Errorf("read key of secrets: %w", err)
	}
	defer clear(raw)
	text, ok := bytes.CutPrefix(bytes.TrimSpace(raw), []byte(keyHead))
	b := make([]byte, base64.StdEncoding.DecodedLen(len(text)))
	defer clear(b)
	n, err := base64.StdEncoding.Decode(b, text)
	if !ok || err != nil || n != keySize {
		return key{}, sandbox.Internal.Errorf("%s is not a key of secrets", path).WithHint("restore the file from a backup")
	}
	return key{NewValue(b[:n])}, nil
}

// makeKey makes DIR/secret.key, which must not be there: written beside, made
// durable, then linked, so that a crash leaves no half of a key.
func makeKey(dir string) (_ key, err error) {
	k := key{own(make([]byte, keySize))}
	rand.Read(k.v.bytes())
	path := filepath.Join(dir, KeyFile)
	tmp := path + "." + rand.Text()
	defer func() {
		if e := os.Remove(tmp); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, sandbox.Internal.Errorf("make key of secrets: %w", e))
		}
	}()
	text := append([]byte(keyHead), base64.StdEncoding.EncodeToString(k.v.bytes())...)
	defer clear(text)
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = f.Write(append(text, '\n'))
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err == nil {
		err = os.Link(tmp, path)
	}
	if err == nil {
		err = syncDir(dir)
	}
	if err != nil {
		return key{}, sandbox.Internal.Errorf("make key of secrets: %w", err)
	}
	return k, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
