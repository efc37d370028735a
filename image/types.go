package image

import (
	"context"
	"slices"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"

	"vivarium/image/layer"
)

// Config is the part of an image's OCI config that says how to run it
// (image-spec, config.md).
type Config struct {
	Env          []string          `json:"env,omitempty"` // KEY=value
	WorkingDir   string            `json:"working_dir,omitempty"`
	User         string            `json:"user,omitempty"` // name or id, optionally :group
	Entrypoint   []string          `json:"entrypoint,omitempty"`
	Cmd          []string          `json:"cmd,omitempty"`
	ExposedPorts []string          `json:"exposed_ports,omitempty"` // "80/tcp"
	Labels       map[string]string `json:"labels,omitempty"`
	StopSignal   string            `json:"stop_signal,omitempty"`
	Volumes      []string          `json:"volumes,omitempty"`
}

// Image is one image as one tenant sees it.
type Image struct {
	ID       string // "im-" and 64 hex digits
	Digest   string // of the manifest, "sha256:…"; of the config where there was no manifest
	Tenant   string
	Tags     []string // as Docker shows them: "base:latest", "ghcr.io/x/y:1"
	Size     int64    // bytes of the EROFS file, a multiple of 4096
	Disk     int64    // bytes it takes on disk; less than Size where it has holes
	Config   Config
	Platform string // "linux/amd64"
	Created  time.Time
	LastUsed time.Time
	Source   string // where it came from, such as "pull:docker.io/library/debian:12" or "load:rootfs"
	Path     string // the EROFS file
	Xattrs   string // file for ReadXattrs; "" if the image has no extended attributes
}

// Limits bounds what an image may ask for; see layer.Limits.
type Limits = layer.Limits

// DialPolicy decides whether a connection for a tenant may be opened. host is as
// it was asked for, addr what it resolved to, "ip:port"; it is asked for every
// connection, so redirects, token servers and mirrors are covered. A non-nil
// error refuses.
type DialPolicy func(ctx context.Context, network, host, addr string) error

// Options configures a Store.
type Options struct {
	// Dir holds everything; it is created if missing, readable by root only.
	Dir string
	// DiskBudget is how many bytes images may take on disk; 0 is no limit.
	// Images pulled from a registry are evicted to stay below it, least
	// recently used first.
	DiskBudget int64
	// Reserve is how many bytes a pull or load leaves free on the disk.
	Reserve int64
	// Mirrors lists, per registry ("docker.io"), where to ask first, in order:
	// "host[:port][/prefix]", or with "http://" in front for plain HTTP.
	Mirrors map[string][]string
	// Insecure lists registries ("host[:port]") that are spoken to by plain
	// HTTP. Loopback always is.
	Insecure []string
	// Limits bounds one image; zero fields take layer.DefaultLimits.
	Limits Limits
	// Keychain finds credentials; nil is Docker's own configuration of the user
	// that runs the daemon.
	Keychain authn.Keychain
	// Credentials, if not nil, gives each tenant a keychain of its own in place
	// of Keychain, so that one does not fetch with what belongs to another. A
	// nil result is a tenant without credentials.
	Credentials func(tenant string) authn.Keychain
	// Fetch gives what decides on the connections for a tenant; nil, or a nil
	// result, allows all. Where something decides, no proxy is used.
	Fetch func(tenant string) DialPolicy
	// InUse reports images that must stay although no Use is open, for the
	// evictions that Pull and Load start. May be nil.
	InUse func(id string) bool
	// Stall is how long a registry may send nothing; 0 is 30 s.
	Stall time.Duration
	// Failpoint is called with the name of each step before its effects are
	// made durable; an error makes the operation fail there. For tests.
	Failpoint func(step string) error
}

// Policy says when Pull asks the registry.
type Policy int

// The pull policies.
const (
	Missing Policy = iota // only if the tenant has no such image
	Always                // ask for the manifest each time
	Never                 // use what is there
)

// PullOptions says how to pull.
type PullOptions struct {
	Policy Policy
	// Platform is "os/arch[/variant]"; "" is this machine's.
	Platform string
	// Auth replaces the keychain for the registry itself; mirrors never see it.
	Auth authn.Authenticator
	// Progress is called from time to time, never concurrently. It must not
	// block. May be nil.
	Progress func(Progress)
}

// Progress is how far a pull or load is.
type Progress struct {
	Stage string // "resolve", "download"; "read", "convert"
	Done  int64  // bytes
	Total int64  // bytes; 0 while unknown
}

// Format is the form of something to load.
type Format string

// The formats that Load takes; the tars may be compressed by gzip or zstd.
const (
	Auto      Format = ""
	OCILayout Format = "oci-layout" // directory or tar
	Docker    Format = "docker"     // what docker save writes
	RootFS    Format = "rootfs"     // tar of a root file system
)

// LoadOptions says how to load.
type LoadOptions struct {
	Format Format
	// Tag names the image, where the archive holds one; required for RootFS
	// to be found again by name.
	Tag string
	// Config is that of a RootFS image; other formats bring their own.
	Config *Config
	// Source is recorded with the image; "" is "load:" and the format.
	Source string
	// Platform chooses from an index; "" is this machine's.
	Platform string
	Progress func(Progress)
}

// GCReport says what a collection removed.
type GCReport struct {
	Removed []string // ids
	Freed   int64    // bytes on disk
	Used    int64    // bytes on disk afterwards
}

// clone returns a copy that shares nothing mutable with i.
func (i *Image) clone() *Image {
	c := *i
	c.Tags = slices.Clone(i.Tags)
	c.Config = i.Config.clone()
	return &c
}

func (c Config) clone() Config {
	c.Env = slices.Clone(c.Env)
	c.Entrypoint = slices.Clone(c.Entrypoint)
	c.Cmd = slices.Clone(c.Cmd)
	c.ExposedPorts = slices.Clone(c.ExposedPorts)
	c.Volumes = slices.Clone(c.Volumes)
	if c.Labels != nil {
		l := make(map[string]string, len(c.Labels))
		for k, v := range c.Labels {
			l[k] = v
		}
		c.Labels = l
	}
	return c
}
