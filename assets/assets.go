// Package assets holds the programs that viv carries inside: the sentry, what
// starts it, and the guest, which runs in every sandbox. They are
// extracted once per version and kept as long as anything of that version
// lives.
package assets

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"

	"vivarium/image/erofsimg"
	"vivarium/runtime/gvisor"
	"vivarium/sandbox"
)

//go:embed bin
var bin embed.FS

// maxProgram bounds what an embedded program unpacks to.
const maxProgram = 256 << 20

// Paths are the extracted files.
type Paths struct {
	Sentry     string // executable by everyone: the sentry's user starts it
	Start      string // viv-start, likewise
	GuestImage string // EROFS with /viv-guest
	PauseImage string // EROFS with /pause
}

// Install extracts what is missing below dir.
func Install(dir string) (Paths, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Paths{}, sandbox.Internal.Errorf("make program directory: %w", err)
	}
	sentry, err := program("viv-sentry")
	if err != nil {
		return Paths{}, err
	}
	start, err := program("viv-start")
	if err != nil {
		return Paths{}, err
	}
	guest, err := program("viv-guest")
	if err != nil {
		return Paths{}, err
	}
	pause, err := gvisor.PauseProgram()
	if err != nil {
		return Paths{}, err
	}
	var p Paths
	if p.Sentry, err = install(dir, "viv-sentry", "", 0o755, sentry, func(f *os.File) error {
		_, err := f.Write(sentry)
		return err
	}); err != nil {
		return Paths{}, err
	}
	if p.Start, err = install(dir, "viv-start", "", 0o755, start, func(f *os.File) error {
		_, err := f.Write(start)
		return err
	}); err != nil {
		return Paths{}, err
	}
	if p.GuestImage, err = install(dir, "guest", ".erofs", 0o644, guest, func(f *os.File) error {
		return image(f, "viv-guest", guest)
	}); err != nil {
		return Paths{}, err
	}
	if p.PauseImage, err = install(dir, "pause", ".erofs", 0o644, pause, func(f *os.File) error {
		return image(f, "pause", pause, "proc", "sys", "dev", "tmp")
	}); err != nil {
		return Paths{}, err
	}
	return p, nil
}

// program unpacks an embedded program.
func program(name string) ([]byte, error) {
	packed, err := bin.ReadFile("bin/" + name + ".zst")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, sandbox.Unsupported.Errorf("this binary was built without %s inside", name).WithHint("build it with `make build`")
	}
	if err != nil {
		return nil, sandbox.Internal.Errorf("read embedded %s: %w", name, err)
	}
	z, err := zstd.NewReader(bytes.NewReader(packed), zstd.WithDecoderMaxMemory(maxProgram))
	if err != nil {
		return nil, sandbox.Internal.Errorf("unpack %s: %w", name, err)
	}
	defer z.Close()
	b, err := io.ReadAll(io.LimitReader(z, maxProgram))
	if err != nil {
		return nil, sandbox.Internal.Errorf("unpack %s: %w", name, err)
	}
	return b, nil
}

// install writes a file whose name tells its content, unless it is there.
func install(dir, name, suffix string, mode fs.FileMode, content []byte, write func(*os.File) error) (string, error) {
	sum := sha256.Sum256(content)
	path := filepath.Join(dir, name+"-"+hex.EncodeToString(sum[:6])+suffix)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	f, err := os.CreateTemp(dir, ".new-*")
	if err != nil {
		return "", sandbox.Internal.Errorf("extract %s: %w", name, err)
	}
	defer os.Remove(f.Name())
	err = write(f)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return "", sandbox.Internal.Errorf("extract %s: %w", name, err)
	}
	return path, nil
}

// image writes a file system of one program and some empty directories.
func image(f *os.File, name string, program []byte, dirs ...string) error {
	w := erofsimg.NewWriter(f, erofsimg.Options{})
	data, err := w.Data(bytes.NewReader(program), int64(len(program)))
	if err != nil {
		return err
	}
	root := erofsimg.NewDir(0o755)
	root.Children[name] = erofsimg.Link{Node: &erofsimg.Node{Mode: erofsimg.TypeRegular | 0o755, Data: data}}
	for _, d := range dirs {
		root.Children[d] = erofsimg.Link{Node: erofsimg.NewDir(0o755)}
	}
	_, err = w.Finish(root)
	return err
}

// Prune removes extracted files of other versions for which keep is false.
func Prune(dir string, current Paths, keep func(path string) bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return sandbox.Internal.Errorf("list programs: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if path == current.Sentry || path == current.Start || path == current.GuestImage || path == current.PauseImage || keep(path) {
			continue
		}
		// a running sandbox holds its guest image open; only the sentry's path is
		// needed again
		if strings.HasPrefix(e.Name(), "viv-sentry-") || strings.HasPrefix(e.Name(), "viv-start-") || strings.HasPrefix(e.Name(), ".new-") || strings.HasSuffix(e.Name(), ".erofs") {
			if err := os.Remove(path); err != nil {
				return sandbox.Internal.Errorf("remove old program: %w", err)
			}
		}
	}
	return nil
}
