package native

import (
	"context"
	"errors"
	"io"
	"net"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
	"vivarium/server"
)

type ports struct{ eng Engine }

// Dial carries one connection to a TCP port inside. The end of the client's
// stream closes the writing side.
func (p *ports) Dial(ctx context.Context, stream *connect.BidiStream[v1.DialRequest, v1.DialResponse]) error {
	first, err := stream.Receive()
	if err != nil {
		if errors.Is(err, io.EOF) {
			return sandbox.Invalid.Errorf("the first message is missing")
		}
		return err
	}
	if err := checkRef(first.SandboxId); err != nil {
		return err
	}
	if first.Port < 1 || first.Port > 65535 {
		return sandbox.Invalid.Errorf("port %d is not between 1 and 65535", first.Port)
	}
	c, err := p.eng.Dial(ctx, server.Tenant(ctx), first.SandboxId, uint16(first.Port))
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if err := stream.Send(&v1.DialResponse{Connected: true}); err != nil {
		return err
	}
	go func() {
		for m := first; ; {
			if len(m.Data) > 0 {
				if _, err := c.Write(m.Data); err != nil {
					return
				}
			}
			var err error
			if m, err = stream.Receive(); err != nil {
				if errors.Is(err, io.EOF) {
					closeWrite(c)
				}
				return
			}
		}
	}()
	buf := make([]byte, server.Chunk)
	var msg v1.DialResponse
	for {
		n, err := c.Read(buf)
		if n > 0 {
			msg.Data = buf[:n]
			if serr := stream.Send(&msg); serr != nil {
				return serr
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return sandbox.Unavailable.Errorf("read from port %d: %w", first.Port, err)
		}
	}
}

func closeWrite(c net.Conn) {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
	}
}
