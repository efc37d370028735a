package sandbox

import (
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
