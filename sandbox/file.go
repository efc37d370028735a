package sandbox

import (
	"context"
	"io"
	"io/fs"
	"time"
)

// FileInfo describes one file inside a sandbox. Names are bytes, not
// necessarily UTF-8.
type FileInfo struct {
	Path    string // as asked for, or the name within the listed directory
	Size    int64
	Mode    fs.FileMode // type and permission bits, setuid, setgid and sticky included
	UID     uint32
	GID     uint32
	ModTime time.Time
	Target  string // of a symbolic link
}

// FileEvent is one change that a watch saw.
type FileEvent struct {
	Op   FileOp
	Path string
	// From is the old path of a rename, where it is known.
	From string
}

// FileOp is what happened to a watched file.
type FileOp string

const (
	FileCreated  FileOp = "created"
	FileModified FileOp = "modified"
	FileRemoved  FileOp = "removed"
	FileRenamed  FileOp = "renamed"
	FileAttrib   FileOp = "attrib"
	// FileOverflow means that events were lost: look at the directory again.
	FileOverflow FileOp = "overflow"
)

// WriteOptions says how a file is written.
type WriteOptions struct {
	Path    string
	User    string      // as in ExecSpec
	Mode    fs.FileMode // permission bits; 0: those it has, else 0644
	Parents bool        // make missing parent directories
	Append  bool        // to the end, not atomically; else the file is replaced as a whole
	ModTime time.Time   // zero: the time of writing
}

// Files are the files of one running sandbox, seen by the same user as an exec
// with that user would be. Relative paths start at the sandbox's workdir.
type Files interface {
	// Read opens a regular file at an offset; length 0 reads to its end.
	// Devices, FIFOs and sockets are Invalid.
	Read(ctx context.Context, path, user string, offset, length int64) (io.ReadCloser, FileInfo, error)
	Write(ctx context.Context, opts WriteOptions, r io.Reader) (FileInfo, error)
	// List calls fn with pages of the directory's entries, in no order.
	List(ctx context.Context, path, user string, fn func([]FileInfo) error) error
	Stat(ctx context.Context, path, user string, follow bool) (FileInfo, error)
	MakeDir(ctx context.Context, path, user string, mode fs.FileMode, parents bool) error
	Remove(ctx context.Context, path, user string, recursive bool) error
	Rename(ctx context.Context, from, to, user string) error
	// Watch calls started once the watch is set and fn with every change, until
	// ctx ends or fn fails.
	Watch(ctx context.Context, path, user string, recursive bool, started func(), fn func(FileEvent) error) error
	// Download is a tar stream of the file or directory.
	Download(ctx context.Context, path, user string) (io.ReadCloser, error)
	// Upload extracts a tar stream into a directory, which is made if missing. With
	// owners, files get the numeric owners of the archive, else the user.
	// Entries that would leave it are refused.
	Upload(ctx context.Context, path, user string, owners bool, r io.Reader) (entries, bytes int64, err error)
}
