// Package config is the configuration of the daemon. Its sources, later over
// earlier: defaults, a YAML file, VIV_* environment variables, flags. A setting
// that is unknown or wrong is an error that names its place and the reason.
package config

import (
	"time"
)

// Size is a number of bytes; written as 512MiB, 1GiB, 10MB or plain bytes.
type Size int64

// CPU is thousandths of a core; written as cores (0.5) or 500m.
type CPU int64

// Duration is written as 5m, 300ms or 1h30m; "0" is none.
type Duration time.Duration

// Config is every setting. What each means, and its default, is in
// reference.yaml, which is tested to say the same as Default.
type Config struct {
	DataDir      string    `yaml:"data_dir"`
	Listen       string    `yaml:"listen"`
	ListenPublic bool      `yaml:"listen_public"`
	UnixSocket   string    `yaml:"unix_socket"`
	CgroupParent string    `yaml:"cgroup_parent"`
	Log          Log       `yaml:"log"`
	UIDs         UIDs      `yaml:"uids"`
	Pool         Pool      `yaml:"pool"`
	Defaults     Defaults  `yaml:"defaults"`
	Limits       Limits    `yaml:"limits"`
	Reserve      Reserve   `yaml:"reserve"`
	Retention    Retention `yaml:"retention"`
	Deadlines    Deadlines `yaml:"deadlines"`
	Spool        Spool     `yaml:"spool"`
	Network      Network   `yaml:"network"`
	Cache        Cache     `yaml:"cache"`
	Tunnel       Tunnel    `yaml:"tunnel"`
	Images       Images    `yaml:"images"`
}

// Log says what is logged and how.
type Log struct {
	Level  string `yaml:"level"`  // debug, info, warn, error
	Format string `yaml:"format"` // text, json
}

// UIDs is the range of users, and of groups of the same numbers, that sentries
// run as.
type UIDs struct {
	First int `yaml:"first"`
	Count int `yaml:"count"`
}

// Pool is the pool of booted machines.
type Pool struct {
	Size int `yaml:"size"`
}

// Defaults are what a sandbox gets that asks for nothing else.
type Defaults struct {
	Runtime       string   `yaml:"runtime"`
	Network       string   `yaml:"network"`
	CPURequest    CPU      `yaml:"cpu_request"`
	CPULimit      CPU      `yaml:"cpu_limit"`
	MemoryRequest Size     `yaml:"memory_request"`
	MemoryLimit   Size     `yaml:"memory_limit"`
	Disk          Size     `yaml:"disk"`
	Pids          int      `yaml:"pids"`
	Timeout       Duration `yaml:"timeout"`
	IdleTimeout   Duration `yaml:"idle_timeout"`
}

// Limits are what a sandbox and a tenant can have at most. 0 is what the host
// has, or no limit.
type Limits struct {
	MaxTimeout   Duration `yaml:"max_timeout"`
	MaxSandboxes int      `yaml:"max_sandboxes"`
	MaxPerTenant int      `yaml:"max_per_tenant"`
	MaxCPU       CPU      `yaml:"max_cpu"`
	MaxMemory    Size     `yaml:"max_memory"`
	MaxDisk      Size     `yaml:"max_disk"`
	MaxPids      int      `yaml:"max_pids"`
	MaxExecs     int      `yaml:"max_execs"`
	Queue        int      `yaml:"queue"`
}

// Reserve is what sandboxes leave to the host.
type Reserve struct {
	CPU    CPU  `yaml:"cpu"`
	Memory Size `yaml:"memory"`
	Disk   Size `yaml:"disk"`
}

// Retention says how long what ended is kept.
type Retention struct {
	Ended  Duration `yaml:"ended"`
	Events Duration `yaml:"events"`
}

// Deadlines of the stages of a sandbox's life.
type Deadlines struct {
	Queue   Duration `yaml:"queue"`
	Image   Duration `yaml:"image"`
	Boot    Duration `yaml:"boot"`
	Network Duration `yaml:"network"`
	Guest   Duration `yaml:"guest"`
	Ready   Duration `yaml:"ready"`
	Stop    Duration `yaml:"stop"`
}

// Spool bounds how much output is kept for reading again.
type Spool struct {
	PerExec    Size `yaml:"per_exec"`
	PerSandbox Size `yaml:"per_sandbox"`
}

// Network is the network of the node.
type Network struct {
	Subnet    string   `yaml:"subnet"`
	Resolvers []string `yaml:"resolvers"`
	Pool      int      `yaml:"pool"`
	Grants    []Grant  `yaml:"grants"`
	Deny      []string `yaml:"deny"`
	// Floor is a policy that every flow passes besides its sandbox's own.
	Floor     Floor               `yaml:"floor"`
	Presets   map[string][]string `yaml:"presets"`   // rules without "allow", by name
	Upstreams map[string]string   `yaml:"upstreams"` // URLs of proxies, by name
	Sources   []string            `yaml:"sources"`   // addresses of the host
	// Limits of each sandbox; a policy may ask for less.
	Bandwidth Size `yaml:"bandwidth"` // bytes a second, each way
	ConnRate  int  `yaml:"conn_rate"` // new flows a second
	MaxConns  int  `yaml:"max_conns"` // flows at a time; 0 is by the host
	DNSRate   int  `yaml:"dns_rate"`  // queries a second
}

// Floor is the operator's policy.
type Floor struct {
	Mode       string   `yaml:"mode"`
	Rules      []string `yaml:"rules"` // "allow TARGET" or "deny TARGET"
	ResolveAny bool     `yaml:"resolve_any"`
}

// Grant lets sandboxes with a network reach a special-purpose range, which
// they otherwise never do.
type Grant struct {
	Prefix string `yaml:"prefix"`
	Ports  []int  `yaml:"ports"` // TCP; none is all
}

// Cache is the cache of packages that sandboxes download.
type Cache struct {
	Enabled    bool                       `yaml:"enabled"`
	DiskBudget Size                       `yaml:"disk_budget"`
	GoDirect   bool                       `yaml:"go_direct"`
	Upstreams  map[string][]CacheUpstream `yaml:"upstreams"` // by kind: debian, npm, pypi, go
}

// CacheUpstream is one registry.
type CacheUpstream struct {
	Name string   `yaml:"name"`
	URL  string   `yaml:"url"`
	Also []string `yaml:"also"`
}

// Images is the store of images.
type Images struct {
	DiskBudget    Size                `yaml:"disk_budget"`
	Mirrors       map[string][]string `yaml:"mirrors"`
	Insecure      []string            `yaml:"insecure"`
	MaxLayerBytes Size                `yaml:"max_layer_bytes"`
	MaxEntries    int                 `yaml:"max_entries"`
}

const (
	mib = 1 << 20
	gib = 1 << 30
)

// Default returns the settings that hold where nothing else is said.
func Default() *Config {
	return &Config{
		DataDir:      "/var/lib/vivarium",
		Listen:       "127.0.0.1:7878",
		CgroupParent: "vivarium",
		Log:          Log{Level: "info", Format: "text"},
		// above what useradd gives to subordinate users (100,000 to 600,100,000),
		// systemd to containers (524,288 to 1,879,048,191) and SSSD to a directory's
		// users (200,000 to 2,000,200,000), below systemd's foreign users
		// (2,147,352,576)
		UIDs: UIDs{First: 2_046_820_352, Count: 65_536},
		Pool: Pool{Size: 8},
		Defaults: Defaults{
			Runtime: "gvisor", Network: "public",
			CPURequest: 1, CPULimit: 2000,
			MemoryRequest: 16 * mib, MemoryLimit: 1 * gib,
			Disk: 10 * gib, Pids: 1024,
			Timeout: Duration(5 * time.Minute),
		},
		Limits: Limits{
			MaxTimeout:   Duration(7 * 24 * time.Hour),
			MaxSandboxes: 2000, MaxPids: 32768, MaxExecs: 1024, Queue: 1000,
		},
		Reserve:   Reserve{CPU: 200, Memory: 512 * mib, Disk: 2 * gib},
		Retention: Retention{Ended: Duration(24 * time.Hour), Events: Duration(72 * time.Hour)},
		Deadlines: Deadlines{
			Queue: Duration(time.Minute), Image: Duration(10 * time.Minute), Boot: Duration(30 * time.Second),
			Network: Duration(10 * time.Second), Guest: Duration(30 * time.Second),
			Ready: Duration(2 * time.Minute), Stop: Duration(30 * time.Second),
		},
		Spool:   Spool{PerExec: 16 * mib, PerSandbox: 64 * mib},
		Network: Network{Pool: 16, Floor: Floor{Mode: "public"}, Bandwidth: 1 << 30, ConnRate: 500, DNSRate: 200},
		Cache:   Cache{DiskBudget: 10 << 30},
		Tunnel:  Tunnel{Listen: "127.0.0.1:7879", Domain: "viv.localhost", TCPListen: "127.0.0.1", Ports: "20000-20999", MaxConnections: 256},
		Images:  Images{DiskBudget: 50 * gib, MaxLayerBytes: 20 * gib, MaxEntries: 5_000_000},
	}
}
