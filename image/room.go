package image

import (
	"fmt"
	"io"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// roomEvery is how many bytes are taken between two looks at the free space.
const roomEvery = 16 << 20

// room sees to it that an image in the making leaves on the disk what is kept in
// reserve: with none left, the daemon cannot even note what happens to sandboxes.
type room struct {
	s    *Store
	left int64 // bytes until the next look
}

func (r *room) take(n int) error {
	if r.left -= int64(n); r.left > 0 {
		return nil
	}
	r.left = roomEvery
	return r.s.checkSpace(0)
}

// roomReader is for what is written to disk as it is read.
type roomReader struct {
	io.Reader
	room room
}

func (r *roomReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if terr := r.room.take(n); terr != nil {
		return 0, terr
	}
	return n, err
}

type roomWriter struct {
	io.Writer
	room room
}

func (w *roomWriter) Write(p []byte) (int, error) {
	if err := w.room.take(len(p)); err != nil {
		return 0, err
	}
	return w.Writer.Write(p)
}

// checkSpace fails where the disk has not even this many bytes, in bytes, beyond
// the reserve.
func (s *Store) checkSpace(need int64) error {
	free, err := s.free()
	if err != nil {
		return err
	}
	if need <= free-s.opt.Reserve {
		return nil
	}
	what := "image does not fit"
	if need > 0 {
		what = fmt.Sprintf("download of %d MiB does not fit", need>>20)
	}
	return sandbox.Exhausted.Errorf("%s: %d MiB are free on disk, of which %d are kept in reserve", what, free>>20, s.opt.Reserve>>20).
		WithHint("the disk that holds the images is full: remove images (viv image rm, viv image prune) or make room")
}

// diskFree is how many bytes are free where the images are.
func (s *Store) diskFree() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(s.opt.Dir, &st); err != nil {
		return 0, fmt.Errorf("ask for free space: %w", err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}
