package agent

import (
	"strconv"
	"strings"
)

// tarEntry is what stands in the header of an archive's entry.
type tarEntry struct {
	name, link         string
	kind               byte
	mode               uint32
	uid, gid           uint32
	size               int64 // of what follows in the archive
	sec, nsec          int64
	devMajor, devMinor uint32
	xattrs             [][2]string
	sparse             *sparseMap // the data that follows is preceded by it
	realSize           int64
}

const tarBlock = 512

// append appends the entry's header: POSIX ustar, preceded by an extended
// header (pax, IEEE Std 1003.1) with what ustar cannot hold.
func (e *tarEntry) append(b []byte) []byte {
	var pax []byte
	rec := func(k, v string) {
		// "LENGTH KEY=VALUE\n", the length counting its own digits.
		n := len(k) + len(v) + 3
		l := n + len(strconv.Itoa(n))
		if len(strconv.Itoa(l)) != len(strconv.Itoa(n)) {
			l = n + len(strconv.Itoa(l))
		}
		pax = append(pax, strconv.Itoa(l)+" "+k+"="+v+"\n"...)
	}
	name := e.name
	if e.sparse != nil {
		rec("GNU.sparse.major", "1")
		rec("GNU.sparse.minor", "0")
		rec("GNU.sparse.name", name)
		rec("GNU.sparse.realsize", strconv.FormatInt(e.realSize, 10))
		name = "GNUSparseFile.0/" + name[strings.LastIndexByte(name, '/')+1:]
	}
	if !plain(name, 100) {
		rec("path", name)
	}
	if !plain(e.link, 100) {
		rec("linkpath", e.link)
	}
	if e.size >= 1<<33 {
		rec("size", strconv.FormatInt(e.size, 10))
	}
	if e.uid >= 1<<21 {
		rec("uid", strconv.FormatUint(uint64(e.uid), 10))
	}
	if e.gid >= 1<<21 {
		rec("gid", strconv.FormatUint(uint64(e.gid), 10))
	}
	if e.nsec != 0 || e.sec < 0 || e.sec >= 1<<33 {
		rec("mtime", paxTime(e.sec, e.nsec))
	}
	for _, x := range e.xattrs {
		rec("SCHILY.xattr."+x[0], x[1])
	}
	if len(pax) > 0 {
		h := tarEntry{name: "pax", kind: 'x', mode: 0o644, size: int64(len(pax))}
		b = h.block(b, "pax", "")
		b = append(b, pax...)
		b = pad(b, int64(len(pax)))
	}
	return e.block(b, name, e.link)
}

// plain says whether s can stand in a field of n bytes.
func plain(s string, n int) bool {
	if len(s) > n {
		return false
	}
	for i := range len(s) {
		if s[i] >= 0x80 || s[i] == 0 {
			return false
		}
	}
	return true
}

func paxTime(sec, nsec int64) string {
	if sec < 0 && nsec > 0 {
		// -1.5 is second -2 and half a second.
		sec, nsec = sec+1, 1_000_000_000-nsec
		s := strconv.FormatInt(sec, 10)
		if sec == 0 {
			s = "-0"
		}
		return s + "." + strconv.FormatInt(1_000_000_000+nsec, 10)[1:]
	}
	if nsec == 0 {
		return strconv.FormatInt(sec, 10)
	}
	return strconv.FormatInt(sec, 10) + "." + strconv.FormatInt(1_000_000_000+nsec, 10)[1:]
}

// block appends the 512 bytes of a ustar header. What does not fit is in the
// extended header already.
func (e *tarEntry) block(b []byte, name, link string) []byte {
	at := len(b)
	b = append(b, make([]byte, tarBlock)...)
	h := b[at:]
	octal := func(off, n int, v uint64) {
		s := strconv.FormatUint(v, 8)
		if len(s) >= n {
			s = "0"
		}
		for i := range n - 1 {
			h[off+i] = '0'
		}
		copy(h[off+n-1-len(s):], s)
	}
	copy(h[0:100], name)
	octal(100, 8, uint64(e.mode&0o7777))
	octal(108, 8, uint64(e.uid))
	octal(116, 8, uint64(e.gid))
	octal(124, 12, uint64(e.size))
	octal(136, 12, uint64(max(e.sec, 0)))
	h[156] = e.kind
	copy(h[157:257], link)
	copy(h[257:], "ustar\x0000")
	octal(329, 8, uint64(e.devMajor))
	octal(337, 8, uint64(e.devMinor))
	sum := uint64(8 * ' ')
	for i, c := range h {
		if i < 148 || i >= 156 {
			sum += uint64(c)
		}
	}
	octal(148, 7, sum)
	h[155] = ' '
	return b
}

// pad appends zeros to the next block after n bytes.
func pad(b []byte, n int64) []byte {
	if r := n % tarBlock; r != 0 {
		b = append(b, make([]byte, tarBlock-r)...)
	}
	return b
}

// sparseMap is where a file has data.
type sparseMap struct{ off, len []int64 }

func (m *sparseMap) append(b []byte) []byte {
	at := len(b)
	b = append(strconv.AppendInt(b, int64(len(m.off)), 10), '\n')
	for i := range m.off {
		b = append(strconv.AppendInt(b, m.off[i], 10), '\n')
		b = append(strconv.AppendInt(b, m.len[i], 10), '\n')
	}
	return pad(b, int64(len(b)-at))
}
