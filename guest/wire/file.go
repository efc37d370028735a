package wire

import (
	"io/fs"
	"math"
	"time"

	"vivarium/sandbox"
)

// ReadFile is a request for a file's bytes.
type ReadFile struct {
	User, Path string
	Off, Len   int64 // Len < 0: to the end
}

// Append appends r as a payload.
func (r *ReadFile) Append(b []byte) []byte {
	b = AppendString(AppendString(b, r.User), r.Path)
	return AppendSigned(AppendInt(b, r.Off), r.Len)
}

// DecodeReadFile decodes a ReadFile.
func DecodeReadFile(p []byte) (ReadFile, error) {
	d := NewDec(p)
	r := ReadFile{User: d.String(MaxUser), Path: d.String(MaxPath), Off: d.Int(), Len: d.Signed()}
	return r, d.End()
}

// Attr is what may be given to a file. Nil leaves it.
type Attr struct {
	Mode     *uint32 // permission bits with setuid, setgid and sticky, as in chmod(2)
	UID, GID *uint32
	ModTime  *time.Time
}

func appendOpt(b []byte, v *uint32) []byte {
	if v == nil {
		return AppendBool(b, false)
	}
	return AppendUint(AppendBool(b, true), uint64(*v))
}

func (d *Dec) opt(max uint64) *uint32 {
	if !d.Bool() {
		return nil
	}
	v := uint32(d.Uint(max))
	return &v
}

func (a *Attr) append(b []byte) []byte {
	b = appendOpt(appendOpt(appendOpt(b, a.Mode), a.UID), a.GID)
	b = AppendBool(b, a.ModTime != nil)
	if a.ModTime != nil {
		b = AppendUint(AppendSigned(b, a.ModTime.Unix()), uint64(a.ModTime.Nanosecond()))
	}
	return b
}

func (d *Dec) attr() Attr {
	a := Attr{Mode: d.opt(0o7777), UID: d.opt(math.MaxUint32 - 1), GID: d.opt(math.MaxUint32 - 1)}
	if d.Bool() {
		t := time.Unix(d.Signed(), int64(d.Uint(999_999_999)))
		a.ModTime = &t
	}
	return a
}

// WriteFile is a request to write a file; the bytes follow.
type WriteFile struct {
	User, Path string
	Attr       Attr
	Parents    bool // make missing directories
	Append     bool // to what is there, in place
	InPlace    bool // not by a temporary file and rename
	Sync       bool // to the disk before it counts
	Exclusive  bool // fail where the file exists
}

// AppendTo appends w as a payload.
func (w *WriteFile) AppendTo(b []byte) []byte {
	b = w.Attr.append(AppendString(AppendString(b, w.User), w.Path))
	for _, f := range [...]bool{w.Parents, w.Append, w.InPlace, w.Sync, w.Exclusive} {
		b = AppendBool(b, f)
	}
	return b
}

// DecodeWriteFile decodes a WriteFile.
func DecodeWriteFile(p []byte) (WriteFile, error) {
	d := NewDec(p)
	w := WriteFile{User: d.String(MaxUser), Path: d.String(MaxPath), Attr: d.attr(), Parents: d.Bool(), Append: d.Bool(), InPlace: d.Bool(), Sync: d.Bool(), Exclusive: d.Bool()}
	return w, d.End()
}

// SetAttr is a request to change a file's attributes.
type SetAttr struct {
	User, Path string
	Attr       Attr
}

// Append appends s as a payload.
func (s *SetAttr) Append(b []byte) []byte {
	return s.Attr.append(AppendString(AppendString(b, s.User), s.Path))
}

// DecodeSetAttr decodes a SetAttr.
func DecodeSetAttr(p []byte) (SetAttr, error) {
	d := NewDec(p)
	s := SetAttr{User: d.String(MaxUser), Path: d.String(MaxPath), Attr: d.attr()}
	return s, d.End()
}

// PathOp is a request about a path, or two, with a flag and a number whose
// meaning the method gives.
type PathOp struct {
	User, Path, Other string
	Flag              bool
	N                 int64
}

// Append appends o as a payload.
func (o *PathOp) Append(b []byte) []byte {
	b = AppendString(AppendString(AppendString(b, o.User), o.Path), o.Other)
	return AppendInt(AppendBool(b, o.Flag), o.N)
}

// DecodePathOp decodes a PathOp.
func DecodePathOp(p []byte) (PathOp, error) {
	d := NewDec(p)
	o := PathOp{User: d.String(MaxUser), Path: d.String(MaxPath), Other: d.String(MaxPath), Flag: d.Bool(), N: d.Int()}
	return o, d.End()
}

// TarIn is a request to extract an archive; it follows.
type TarIn struct {
	User, Path string
	Parents    bool // make the destination
	Owners     bool // numeric owners as in the archive, else the user's
	MaxEntries int64
	MaxBytes   int64
}

// Append appends t as a payload.
func (t *TarIn) Append(b []byte) []byte {
	b = AppendBool(AppendBool(AppendString(AppendString(b, t.User), t.Path), t.Parents), t.Owners)
	return AppendInt(AppendInt(b, t.MaxEntries), t.MaxBytes)
}

// DecodeTarIn decodes a TarIn.
func DecodeTarIn(p []byte) (TarIn, error) {
	d := NewDec(p)
	t := TarIn{User: d.String(MaxUser), Path: d.String(MaxPath), Parents: d.Bool(), Owners: d.Bool(), MaxEntries: d.Int(), MaxBytes: d.Int()}
	return t, d.End()
}

// Done is the result of a transfer.
type Done struct {
	Bytes   int64 // of data
	Entries int64
	InPlace bool // the file could only be written in place, not atomically
	More    bool // there was more than the limit
}

// Append appends x as a payload.
func (x *Done) Append(b []byte) []byte {
	return AppendBool(AppendBool(AppendInt(AppendInt(b, x.Bytes), x.Entries), x.InPlace), x.More)
}

// DecodeDone decodes a Done.
func DecodeDone(p []byte) (Done, error) {
	d := NewDec(p)
	x := Done{Bytes: d.Int(), Entries: d.Int(), InPlace: d.Bool(), More: d.Bool()}
	return x, d.End()
}

// File is one file's information as the guest's kernel gives it.
type File struct {
	Name     string // bytes, not necessarily UTF-8
	Size     int64
	Mode     uint32 // st_mode
	UID, GID uint32
	Sec      int64 // modification time
	Nsec     int64
	Target   string
}

// Append appends f to a payload.
func (f *File) Append(b []byte) []byte {
	b = AppendInt(AppendString(b, f.Name), f.Size)
	b = AppendUint(AppendUint(AppendUint(b, uint64(f.Mode)), uint64(f.UID)), uint64(f.GID))
	return AppendString(AppendInt(AppendSigned(b, f.Sec), f.Nsec), f.Target)
}

// FileMinSize is the least that a File takes in a payload.
const FileMinSize = 8

// File takes a File.
func (d *Dec) File() File {
	return File{Name: d.String(MaxPath), Size: d.Int(), Mode: uint32(d.Uint(math.MaxUint32)),
		UID: uint32(d.Uint(math.MaxUint32)), GID: uint32(d.Uint(math.MaxUint32)),
		Sec: d.Signed(), Nsec: int64(d.Uint(999_999_999)), Target: d.String(MaxPath)}
}

// Info is f in the words of package sandbox.
func (f *File) Info() sandbox.FileInfo {
	return sandbox.FileInfo{Path: f.Name, Size: f.Size, Mode: FileMode(f.Mode), UID: f.UID, GID: f.GID, ModTime: time.Unix(f.Sec, f.Nsec), Target: f.Target}
}

// FileMode makes a fs.FileMode of a st_mode; see inode(7).
func FileMode(m uint32) fs.FileMode {
	r := fs.FileMode(m & 0o777)
	switch m & 0o170000 {
	case 0o040000:
		r |= fs.ModeDir
	case 0o120000:
		r |= fs.ModeSymlink
	case 0o010000:
		r |= fs.ModeNamedPipe
	case 0o140000:
		r |= fs.ModeSocket
	case 0o020000:
		r |= fs.ModeDevice | fs.ModeCharDevice
	case 0o060000:
		r |= fs.ModeDevice
	case 0o100000:
	default:
		r |= fs.ModeIrregular
	}
	if m&0o4000 != 0 {
		r |= fs.ModeSetuid
	}
	if m&0o2000 != 0 {
		r |= fs.ModeSetgid
	}
	if m&0o1000 != 0 {
		r |= fs.ModeSticky
	}
	return r
}

// UnixMode makes the permission bits of chmod(2) of a fs.FileMode.
func UnixMode(m fs.FileMode) uint32 {
	r := uint32(m.Perm())
	if m&fs.ModeSetuid != 0 {
		r |= 0o4000
	}
	if m&fs.ModeSetgid != 0 {
		r |= 0o2000
	}
	if m&fs.ModeSticky != 0 {
		r |= 0o1000
	}
	return r
}

var ops = [...]sandbox.FileOp{sandbox.FileCreated, sandbox.FileModified, sandbox.FileRemoved, sandbox.FileRenamed, sandbox.FileAttrib, sandbox.FileOverflow}

// OpCode is the byte of an operation.
func OpCode(op sandbox.FileOp) byte {
	for i, o := range ops {
		if o == op {
			return byte(i)
		}
	}
	return byte(len(ops) - 1)
}

// AppendEvent appends an event to a payload.
func AppendEvent(b []byte, e sandbox.FileEvent) []byte {
	return AppendString(AppendString(append(b, OpCode(e.Op)), e.Path), e.From)
}

// DecodeEvents decodes the payload of a TEvents frame.
func DecodeEvents(p []byte) ([]sandbox.FileEvent, error) {
	d := NewDec(p)
	var l []sandbox.FileEvent
	for d.More() {
		l = append(l, sandbox.FileEvent{Op: ops[d.Uint(uint64(len(ops)-1))], Path: d.String(MaxPath), From: d.String(MaxPath)})
	}
	return l, d.End()
}

// SkipEvent takes one event and returns how many bytes are left.
func (d *Dec) SkipEvent() int {
	d.Uint(255)
	d.Bytes(MaxPath)
	d.Bytes(MaxPath)
	return len(d.b)
}
