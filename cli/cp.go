package cli

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/cli/tree"
	"vivarium/client"
	"vivarium/sandbox"
)

// Bits of st_mode; see inode(7).
const (
	statType    = 0o170000
	statRegular = 0o100000
	statDir     = 0o040000
	statLink    = 0o120000
)

func (a *app) cpCmd() *cobra.Command {
	k := &copier{app: a}
	cmd := &cobra.Command{
		Use:   "cp SANDBOX:PATH DESTINATION | SOURCE SANDBOX:PATH",
		Short: "Copy files and directories into and out of a sandbox",
		Long: `Copy files and directories into and out of a sandbox. What the names mean is
as in docker cp: a directory is copied into one that exists, and becomes one
that does not; DIR/. is what is in it. "-" is a tar stream on standard input or
output. Whatever the sandbox sends, nothing is written outside DESTINATION.`,
		Example: `  viv cp box:/out/report.txt .
  viv cp ./src box:/work
  viv cp box:/work - | tar t`,
		Args:              exactly("SOURCE", "DESTINATION"),
		ValidArgsFunction: a.completeCopy,
	}
	fs := cmd.Flags()
	fs.BoolVarP(&k.archive, "archive", "a", false, "keep owners and groups by number")
	fs.BoolVarP(&k.follow, "follow-link", "L", false, "copy what a link SOURCE names, not the link")
	fs.StringVarP(&k.user, "user", "u", "", "user inside, as in exec")
	fs.BoolVarP(&k.quiet, "quiet", "q", false, "show no progress")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		sref, spath, from := splitCopy(args[0])
		dref, dpath, to := splitCopy(args[1])
		switch {
		case from && to:
			return usage("one of the two must be on this machine").withHint("copy out first, then in")
		case !from && !to:
			return usage("one of the two must be in a sandbox, as SANDBOX:PATH")
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		k.c = c
		if from {
			k.ref = sref
			return k.out(cmd.Context(), spath, args[1])
		}
		k.ref = dref
		return k.in(cmd.Context(), args[0], dpath)
	}
	return cmd
}

func (e *exitCode) withHint(s string) error {
	var se *sandbox.Error
	if errors.As(e.err, &se) {
		se.Hint = s
	}
	return e
}

// splitCopy takes SANDBOX:PATH apart. As in docker cp a name with a / before
// the colon, or one that begins with a dot, is of this machine.
func splitCopy(s string) (ref, p string, ok bool) {
	ref, p, ok = strings.Cut(s, ":")
	if !ok || ref == "" || strings.ContainsAny(ref, "/\\") || strings.HasPrefix(s, ".") {
		return "", s, false
	}
	if p == "" {
		p = "."
	}
	return ref, p, true
}

// copier is one `viv cp`.
type copier struct {
	*app
	c                      *client.Client
	ref, user              string
	archive, follow, quiet bool
}

// contents says whether a source means what is in the directory.
func contents(p string) bool { return p == "." || strings.HasSuffix(p, "/.") }

// in copies into the sandbox.
func (k *copier) in(ctx context.Context, src, dst string) error {
	if src == "-" {
		if _, tty := terminal(k.In); tty {
			return sandbox.Invalid.Errorf("standard input is a terminal").WithHint("pipe a tar stream in")
		}
		if _, err := k.existingDir(ctx, dst); err != nil {
			return err
		}
		_, _, err := k.c.UploadAs(ctx, k.uploadTo(dst), k.In)
		return err
	}
	stat := os.Lstat
	if k.follow || contents(src) || strings.HasSuffix(src, "/") {
		stat = os.Stat
	}
	fi, err := stat(src)
	if err != nil {
		return sandbox.NotFound.Errorf("read source: %w", err)
	}
	to, err := k.c.Stat(ctx, k.ref, dst, k.user, true)
	if err != nil && !errors.Is(err, sandbox.NotFound) {
		return err
	}
	if err != nil { // is it the sandbox or the path that does not exist?
		if _, gerr := k.c.Get(ctx, k.ref); gerr != nil {
			return gerr
		}
		to = nil
	}
	toDir := to != nil && to.Mode&statType == statDir
	if fi.IsDir() {
		switch {
		case to != nil && !toDir:
			return sandbox.Conflict.Errorf("%s is a file in the sandbox, and %s a directory", clean(dst), src)
		case toDir && !contents(src):
			dst = path.Join(dst, baseName(src))
		case to == nil:
			if _, err := k.existingDir(ctx, path.Dir(path.Clean(dst))); err != nil {
				return err
			}
		}
		if k.follow {
			if src, err = filepath.EvalSymlinks(src); err != nil {
				return sandbox.NotFound.Errorf("read source: %w", err)
			}
		}
		return k.upload(ctx, tree.Pack(filepath.Clean(src), ".", k.archive), dst)
	}
	switch {
	case toDir:
		dst = path.Join(dst, baseName(src))
	case strings.HasSuffix(dst, "/"):
		return sandbox.NotFound.Errorf("there is no directory %s in the sandbox", clean(dst))
	}
	switch fi.Mode().Type() {
	case 0:
		if !k.archive {
			return k.writeFile(ctx, src, dst)
		}
		fallthrough // an archive has owners
	case fs.ModeSymlink:
		return k.upload(ctx, tree.Pack(src, path.Base(dst), k.archive), path.Dir(dst))
	}
	return sandbox.Invalid.Errorf("%s is neither a file, a directory nor a link", src)
}

func (k *copier) uploadTo(dst string) *v1.UploadRequest {
	return &v1.UploadRequest{SandboxId: k.ref, Path: []byte(dst), User: k.user, Owners: k.archive}
}

func (k *copier) existingDir(ctx context.Context, p string) (*v1.FileInfo, error) {
	fi, err := k.c.Stat(ctx, k.ref, p, k.user, true)
	if err != nil {
		return nil, err
	}
	if fi.Mode&statType != statDir {
		return nil, sandbox.Conflict.Errorf("%s is not a directory in the sandbox", clean(p))
	}
	return fi, nil
}

func (k *copier) upload(ctx context.Context, r io.ReadCloser, dst string) error {
	defer r.Close()
	p := k.bar(dst)
	_, _, err := k.c.UploadAs(ctx, k.uploadTo(dst), p.reader(r, "copy", 0))
	p.end(err)
	return err
}

func (k *copier) bar(what string) *progress {
	if k.quiet {
		return &progress{}
	}
	return k.newProgress(what)
}

func (k *copier) writeFile(ctx context.Context, src, dst string) error {
	f, err := os.Open(src)
	if err != nil {
		return sandbox.Invalid.Errorf("read source: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return sandbox.Invalid.Errorf("read source: %w", err)
	}
	p := k.bar(src)
	_, err = k.c.WriteFile(ctx, &v1.WriteFileRequest{
		SandboxId: k.ref, Path: []byte(dst), User: k.user, Mode: uint32(fi.Mode().Perm()), Mtime: timestamppb.New(fi.ModTime()),
	}, p.reader(f, "copy", fi.Size()))
	p.end(err)
	return err
}

// baseName is the last element of a path of this machine, also of "." and "..".
func baseName(p string) string {
	if abs, err := filepath.Abs(p); err == nil {
		p = abs
	}
	return filepath.Base(p)
}

// out copies out of the sandbox.
func (k *copier) out(ctx context.Context, src, dst string) error {
	if dst == "-" {
		if _, tty := terminal(k.Out); tty {
			return sandbox.Invalid.Errorf("standard output is a terminal").WithHint("pipe the tar stream somewhere")
		}
		r, err := k.c.Download(ctx, k.ref, src, k.user)
		if err != nil {
			return err
		}
		defer r.Close()
		_, err = io.Copy(k.Out, r)
		return err
	}
	info, err := k.c.Stat(ctx, k.ref, src, k.user, k.follow || contents(src) || strings.HasSuffix(src, "/"))
	if err != nil {
		return err
	}
	switch info.Mode & statType {
	case statRegular:
		return k.outFile(ctx, src, dst)
	case statDir:
		return k.outDir(ctx, src, dst)
	case statLink:
		return k.outLink(src, dst, string(info.Target))
	}
	return sandbox.Invalid.Errorf("%s is neither a file, a directory nor a link", clean(src)).
		WithHint("devices, FIFOs and sockets cannot be copied")
}

// place finds the directory and name for a file or link on this machine. The
// directory is what the user named; the name in it is not followed.
func place(src, dst string) (*os.Root, string, error) {
	fi, err := os.Stat(dst)
	dir, name := filepath.Dir(dst), filepath.Base(dst)
	switch {
	case err == nil && fi.IsDir():
		dir, name = dst, path.Base(path.Clean(src))
		if name == "/" || name == "." || name == ".." {
			return nil, "", sandbox.Invalid.Errorf("%s has no name of its own to give the copy", clean(src))
		}
	case strings.HasSuffix(dst, "/"):
		return nil, "", sandbox.NotFound.Errorf("there is no directory %s", dst)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, "", sandbox.NotFound.Errorf("open destination: %w", err)
	}
	return root, name, nil
}

func (k *copier) outFile(ctx context.Context, src, dst string) (err error) {
	root, name, err := place(src, dst)
	if err != nil {
		return err
	}
	defer root.Close()
	r, info, err := k.c.ReadFile(ctx, &v1.ReadFileRequest{SandboxId: k.ref, Path: []byte(src), User: k.user})
	if err != nil {
		return err
	}
	defer r.Close()
	p := k.bar(src)
	err = tree.WriteFile(root, name, fileHeader(info), p.reader(r, "copy", info.GetSize()), tree.Options{Owner: k.archive})
	p.end(err)
	return err
}

func (k *copier) outLink(src, dst, target string) error {
	root, name, err := place(src, dst)
	if err != nil {
		return err
	}
	defer root.Close()
	return tree.WriteLink(root, name, target)
}

func (k *copier) outDir(ctx context.Context, src, dst string) error {
	root, err := k.destination(src, dst)
	if err != nil {
		return err
	}
	defer root.Close()
	r, err := k.c.Download(ctx, k.ref, src, k.user)
	if err != nil {
		return err
	}
	defer r.Close()
	p := k.bar(src)
	err = tree.Extract(root, p.reader(r, "copy", 0), tree.Options{
		Owner: k.archive,
		Warn:  func(name, what string) { fmt.Fprintf(k.Err, "viv: left out %s: it is %s\n", clean(name), what) },
	})
	p.end(err)
	return err
}

// destination opens the directory that becomes the copy of src.
func (k *copier) destination(src, dst string) (*os.Root, error) {
	fi, err := os.Stat(dst)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.Mkdir(filepath.Clean(dst), 0o755); err != nil {
			return nil, sandbox.NotFound.Errorf("make destination: %w", err)
		}
		return openRoot(dst)
	}
	if err != nil {
		return nil, sandbox.Invalid.Errorf("open destination: %w", err)
	}
	if !fi.IsDir() {
		return nil, sandbox.Conflict.Errorf("%s is a file, and %s a directory in the sandbox", dst, clean(src))
	}
	root, err := openRoot(dst)
	if err != nil || contents(src) {
		return root, err
	}
	defer root.Close()
	name := path.Base(path.Clean(src))
	if name == "/" || name == ".." {
		return nil, sandbox.Invalid.Errorf("%s has no name of its own to give the copy", clean(src)).
			WithHint("write %s/. for what is in it", strings.TrimSuffix(src, "/"))
	}
	// A link of this name may be from an earlier copy: it is not followed.
	if fi, err := root.Lstat(name); err == nil && !fi.IsDir() {
		return nil, sandbox.Conflict.Errorf("%s is not a directory", filepath.Join(dst, name))
	} else if err != nil {
		if err := root.Mkdir(name, 0o755); err != nil {
			return nil, sandbox.Denied.Errorf("make destination: %w", err)
		}
	}
	sub, err := root.OpenRoot(name)
	if err != nil {
		return nil, sandbox.Conflict.Errorf("open destination: %w", err)
	}
	return sub, nil
}

func openRoot(dir string) (*os.Root, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, sandbox.Denied.Errorf("open destination: %w", err)
	}
	return root, nil
}

// fileHeader is the header of a single file that was read without an archive.
func fileHeader(fi *v1.FileInfo) *tar.Header {
	h := &tar.Header{Typeflag: tar.TypeReg, Mode: int64(fi.GetMode() & 0o777), Uid: int(fi.GetUid()), Gid: int(fi.GetGid())}
	if t := fi.GetMtime(); t.IsValid() {
		h.ModTime = t.AsTime()
	}
	return h
}

func (a *app) completeCopy(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 1 || strings.Contains(prefix, ":") || strings.HasPrefix(prefix, "/") || strings.HasPrefix(prefix, ".") {
		return nil, cobra.ShellCompDirectiveDefault
	}
	var out []string
	a.sandboxNames(cmd.Context(), func(name, _ string) {
		if strings.HasPrefix(name, prefix) {
			out = append(out, name+":")
		}
	})
	return out, cobra.ShellCompDirectiveNoSpace
}
