package image

import (
	"context"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// publish makes a converted image a tenant's: it moves the files to their
// place, unless they are there already, and records img under tags. b is nil
// if the files are known to be there; its files are gone afterwards.
func (s *Store) publish(ctx context.Context, img *Image, b *built, tags []string, proofs []pull) (*Image, error) {
	if b != nil {
		defer b.remove()
	}
	placed := false // files that have no row yet
	s.commit.Lock()
	defer s.commit.Unlock()
	img.Path = s.blob(img.ID, ".erofs")
	old := s.any(img.ID)
	switch {
	case old != nil:
		img.Size, img.Disk, img.Xattrs = old.Size, old.Disk, old.Xattrs
	case b == nil:
		return nil, errVanished
	default:
		img.Size, img.Disk = b.size, b.disk
		if err := s.makeRoom(ctx, b.disk); err != nil {
			return nil, err
		}
		placed = true
		defer func() {
			if placed {
				os.Remove(s.blob(img.ID, ".erofs"))
				os.Remove(s.blob(img.ID, ".xattrs"))
			}
		}()
		if err := s.place(img, b); err != nil {
			return nil, err
		}
	}
	img.LastUsed = time.Now().UTC()
	if err := s.record(ctx, img, tags, proofs); err != nil {
		return nil, err
	}
	placed = false
	if err := s.fail("recorded"); err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.export(s.tenants[img.Tenant].images[img.ID]), nil
}

// place renames the files of a new image and makes that durable.
func (s *Store) place(img *Image, b *built) error {
	if err := s.fail("place"); err != nil {
		return err
	}
	if b.xattrs != "" {
		img.Xattrs = s.blob(img.ID, ".xattrs")
		if err := os.Rename(b.xattrs, img.Xattrs); err != nil {
			return err
		}
	}
	if err := os.Rename(b.erofs, img.Path); err != nil {
		return err
	}
	if err := syncDir(s.dir(blobDir)); err != nil {
		return err
	}
	return s.fail("placed")
}

// record writes the rows of an image and then the memory. An image that the
// tenant has keeps its own source and times.
func (s *Store) record(ctx context.Context, img *Image, tags []string, proofs []pull) error {
	s.mu.RLock()
	have := s.tenants[img.Tenant] != nil && s.tenants[img.Tenant].images[img.ID] != nil
	s.mu.RUnlock()
	var stmts []stmt
	if !have {
		st, err := putImage(img)
		if err != nil {
			return err
		}
		stmts = append(stmts, st)
	}
	for _, t := range tags {
		stmts = append(stmts, putTag(img.Tenant, t, img.ID))
	}
	for _, p := range proofs {
		stmts = append(stmts, putPull(p))
	}
	if len(stmts) > 0 {
		if err := s.db.apply(ctx, stmts...); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tenant(img.Tenant)
	if !have {
		t.images[img.ID] = img.clone()
	}
	for _, name := range tags {
		t.tags[name] = img.ID
	}
	for _, p := range proofs {
		s.pulls[p] = true
	}
	return nil
}

// any returns some tenant's image with that id, whose files are there.
func (s *Store) any(id string) *Image {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, t := range s.tenants {
		if i := t.images[id]; i != nil {
			return i
		}
	}
	return nil
}

// syncDir makes renames and removals in a directory durable.
func syncDir(dir string) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	if err := unix.Fsync(fd); err != nil {
		return &os.PathError{Op: "fsync", Path: dir, Err: err}
	}
	return nil
}
