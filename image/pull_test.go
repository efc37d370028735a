package image

import (
	"context"
	"testing"

	"vivarium/sandbox"
)

func TestPull(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	ref := reg.push(t, "a/b:1", testImage(t,
		tarOf(t, ent{name: "bin/sh", data: "shell", mode: 0o755}, ent{name: "etc/old", data: "x"}),
		tarOf(t, ent{name: "etc/.wh.old"}, ent{name: "etc/new", data: "y"})))
	s := open(t, Options{})
	ctx := context.Background()

	_, err := s.Pull(ctx, "t", ref, PullOptions{Policy: Never})
	wantKind(t, err, sandbox.NotFound)
	var last Progress
	img, err := s.Pull(ctx, "t", ref, PullOptions{Progress: func(p Progress) { last = p }})
	if err != nil {
		t.Fatal(err)
	}
	if last.Stage != "download" || last.Done != last.Total || last.Total == 0 {
		t.Errorf("last progress: %+v", last)
	}
	if img.Size%4096 != 0 || img.Platform != "linux/amd64" || img.Config.Env[0] != "A=b" || len(img.Tags) != 1 || img.Tags[0] != ref {
		t.Errorf("image: %+v", img)
	}
	f := files(t, img)
	wantFile(t, f, "bin/sh", "shell")
	wantFile(t, f, "etc/new", "y")
	wantFile(t, f, "etc/resolv.conf", "")
	wantNone(t, f, "etc/old")
	reg.srv.Close() // from here on the registry must not be needed
	again, err := s.Pull(ctx, "t", ref, PullOptions{})
	if err != nil || again.ID != img.ID {
		t.Errorf("second pull: %v, %v", again, err)
	}
	_, err = s.Get(ctx, "other", ref)
	wantKind(t, err, sandbox.NotFound)
	wantClean(t, s)
}
