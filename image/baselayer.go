package image

import (
	"archive/tar"
	"bytes"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// maxKeyring bounds a keyring that is copied into the image, in bytes.
const maxKeyring = 4 << 20

// aptSettings are for apt inside a sandbox. apt would fetch as a user of its
// own; what that protects against, the sandbox is for, and user namespaces in
// gVisor and single-user images have no such user.
const aptSettings = `APT::Sandbox::User "root";
APT::Keep-Downloaded-Packages "false";
Acquire::Languages "none";
`

// noServices keeps packages from starting daemons when they are installed
// (invoke-rc.d(8)).
const noServices = "#!/bin/sh\nexit 101\n"

// settings returns the layer that goes on top of the distribution's files: apt
// as it works inside, without the caches and the traces of the host.
func (p *basePlan) settings() ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, d := range []string{"var/cache/apt", "var/lib/apt/lists", "etc/apt/sources.list.d", "var/cache/debconf", "dev"} {
		if err := tarFile(w, path.Join(d, ".wh..wh..opq"), 0, nil); err != nil {
			return nil, err
		}
	}
	for _, f := range []string{
		"etc/apt/.wh.sources.list", "etc/apt/apt.conf.d/.wh.99mmdebstrap", "etc/.wh.machine-id",
		"etc/.wh.hostname", "etc/.wh.resolv.conf", "var/lib/dbus/.wh.machine-id",
	} {
		if err := tarFile(w, f, 0, nil); err != nil {
			return nil, err
		}
	}
	for _, d := range []string{"var/cache/apt", "var/cache/apt/archives", "var/cache/apt/archives/partial", "var/lib/apt/lists", "var/lib/apt/lists/partial", "etc/apt/sources.list.d", "var/cache/debconf"} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: d, Mode: 0o755}); err != nil {
			return nil, err
		}
	}
	files := []struct {
		name string
		mode int64
		data []byte
	}{
		{"etc/apt/sources.list.d/" + p.distro.ID + ".sources", 0o644, formatDeb822(p.sources)},
		{"etc/apt/apt.conf.d/90vivarium", 0o644, []byte(aptSettings)},
		{"usr/sbin/policy-rc.d", 0o755, []byte(noServices)},
		{"etc/machine-id", 0o444, nil}, // filled by each sandbox, or not at all
	}
	for _, f := range files {
		if err := tarFile(w, f.name, f.mode, f.data); err != nil {
			return nil, err
		}
	}
	if err := p.keyrings(w); err != nil {
		return nil, err
	}
	err := w.Close()
	return b.Bytes(), err
}

// keyrings adds the keyrings that the sources name.
func (p *basePlan) keyrings(w *tar.Writer) error {
	seen := map[string]bool{}
	for _, s := range p.sources {
		if !filepath.IsAbs(s.SignedBy) || seen[s.SignedBy] {
			continue
		}
		seen[s.SignedBy] = true
		file := filepath.Join(p.etc, s.SignedBy)
		fi, err := os.Stat(file)
		if err != nil || !fi.Mode().IsRegular() || fi.Size() > maxKeyring {
			continue // apt will say so if it misses it
		}
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := tarFile(w, strings.TrimPrefix(path.Clean(s.SignedBy), "/"), 0o644, b); err != nil {
			return err
		}
	}
	return nil
}

func tarFile(w *tar.Writer, name string, mode int64, data []byte) error {
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(data))}); err != nil {
		return err
	}
	_, err := w.Write(data)
	return err
}
