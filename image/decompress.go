package image

import (
	"bufio"
	"bytes"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"vivarium/sandbox"
)

// zstdWindow bounds the memory of a zstd decoder; zstd --long=27 needs it.
const zstdWindow = 128 << 20

// decompress returns the plain bytes of r, which is plain, gzip or zstd by its
// first bytes, whatever its media type says. Output that exceeds its input by
// more than the limits allow gives Invalid. Close frees the decoder, not r.
func decompress(r io.Reader, l Limits) (io.ReadCloser, error) {
	in := &counter{r: r}
	br := bufio.NewReaderSize(in, 64<<10)
	head, err := br.Peek(6)
	if err != nil && err != io.EOF {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, sandbox.Invalid.Errorf("decompress layer: %w", err)
		}
		return &inflater{out: z, close: func() { z.Close() }, in: in, limit: l}, nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}) || isSkippable(head):
		z, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(zstdWindow))
		if err != nil {
			return nil, sandbox.Invalid.Errorf("decompress layer: %w", err)
		}
		return &inflater{out: z, close: z.Close, in: in, limit: l}, nil
	case bytes.HasPrefix(head, []byte("BZh")), bytes.HasPrefix(head, []byte("\xfd7zXZ\x00")):
		return nil, sandbox.Unsupported.Errorf("compressed by bzip2 or xz").WithHint("decompress it first, or use gzip or zstd")
	}
	return io.NopCloser(br), nil
}

// isSkippable reports whether b starts a zstd skippable frame (RFC 8878,
// 3.1.2), as zstd:chunked layers may.
func isSkippable(b []byte) bool {
	return len(b) >= 4 && b[0]&0xf0 == 0x50 && b[1] == 0x2a && b[2] == 0x4d && b[3] == 0x18
}

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// inflater guards a decompressor: against bombs, and so that its own errors
// are Invalid while those of the source stay what they are.
type inflater struct {
	out   io.Reader
	close func()
	in    *counter
	n     int64
	limit Limits
	err   error
}

func (i *inflater) Read(p []byte) (int, error) {
	if i.err != nil {
		return 0, i.err
	}
	n, err := i.out.Read(p)
	i.n += int64(n)
	if i.n > i.limit.RatioFloor && i.n/i.limit.Ratio > i.in.n {
		err = sandbox.Invalid.Errorf("layer is a decompression bomb: %d bytes came out of %d", i.n, i.in.n)
	}
	if err != nil && err != io.EOF {
		err = corrupt(err)
	}
	i.err = err
	return n, err
}

// corrupt marks errors of the decoders as Invalid.
func corrupt(err error) error {
	if sandbox.KindOf(err) != sandbox.Internal || isSourceError(err) {
		return err
	}
	return sandbox.Invalid.Errorf("decompress layer: %w", err)
}

func (i *inflater) Close() error { i.close(); return nil }
