package image

import (
	"encoding/json"
	"path"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"vivarium/sandbox"
)

const (
	maxConfig   = 4 << 20 // bytes of a config or manifest, as Docker has it
	maxManifest = 4 << 20
)

// strings1 is a list of strings; old images have a bare string for one.
type strings1 []string

func (s *strings1) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		var one string
		if err := json.Unmarshal(b, &one); err != nil {
			return err
		}
		*s = strings1{one}
		return nil
	}
	return json.Unmarshal(b, (*[]string)(s))
}

// ociConfig is an image config (image-spec, config.md), as much as we use.
type ociConfig struct {
	Created      *time.Time `json:"created,omitempty"`
	Architecture string     `json:"architecture"`
	OS           string     `json:"os"`
	Variant      string     `json:"variant,omitempty"`
	Config       struct {
		Env          []string            `json:"Env,omitempty"`
		WorkingDir   string              `json:"WorkingDir,omitempty"`
		User         string              `json:"User,omitempty"`
		Entrypoint   strings1            `json:"Entrypoint,omitempty"`
		Cmd          strings1            `json:"Cmd,omitempty"`
		ExposedPorts map[string]struct{} `json:"ExposedPorts,omitempty"`
		Labels       map[string]string   `json:"Labels,omitempty"`
		StopSignal   string              `json:"StopSignal,omitempty"`
		Volumes      map[string]struct{} `json:"Volumes,omitempty"`
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// parsed is what a config says, checked.
type parsed struct {
	Config   Config
	Platform v1.Platform
	Created  time.Time
	DiffIDs  []v1.Hash
}

// parseConfig reads and checks an image config. Errors are Invalid.
func parseConfig(b []byte) (*parsed, error) {
	if len(b) > maxConfig {
		return nil, sandbox.Invalid.Errorf("image config of %d bytes is too large", len(b))
	}
	var c ociConfig
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, sandbox.Invalid.Errorf("read image config: %w", err)
	}
	if c.RootFS.Type != "" && c.RootFS.Type != "layers" {
		return nil, sandbox.Invalid.Errorf("image config: root file system of unknown type %.32q", c.RootFS.Type)
	}
	p := &parsed{Platform: v1.Platform{OS: c.OS, Architecture: c.Architecture, Variant: c.Variant}}
	if c.Created != nil {
		p.Created = *c.Created
	}
	for _, d := range c.RootFS.DiffIDs {
		h, err := sha256Hash(d)
		if err != nil {
			return nil, err
		}
		p.DiffIDs = append(p.DiffIDs, h)
	}
	p.Config = Config{
		Env: c.Config.Env, WorkingDir: c.Config.WorkingDir, User: c.Config.User,
		Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, Labels: c.Config.Labels,
		StopSignal: c.Config.StopSignal,
	}
	for port := range c.Config.ExposedPorts {
		p.Config.ExposedPorts = append(p.Config.ExposedPorts, port)
	}
	for v := range c.Config.Volumes {
		p.Config.Volumes = append(p.Config.Volumes, v)
	}
	slices.Sort(p.Config.ExposedPorts)
	slices.Sort(p.Config.Volumes)
	if err := p.Config.check(); err != nil {
		return nil, err
	}
	return p, nil
}

// check refuses what no process could be started with, and tidies the rest.
func (c *Config) check() error {
	all := slices.Concat(c.Env, c.Entrypoint, c.Cmd, c.ExposedPorts, c.Volumes, []string{c.WorkingDir, c.User, c.StopSignal})
	total := 0
	for _, s := range all {
		if strings.IndexByte(s, 0) >= 0 {
			return sandbox.Invalid.Errorf("image config: zero byte in %.64q", s)
		}
		total += len(s) + 1
	}
	if total > 1<<20 || len(all) > 16384 {
		return sandbox.Invalid.Errorf("image config: environment and command are too large")
	}
	// Variables without a name cannot be set; Docker drops them too.
	c.Env = slices.DeleteFunc(c.Env, func(e string) bool { return e == "" || strings.HasPrefix(e, "=") })
	if c.WorkingDir != "" {
		c.WorkingDir = path.Join("/", c.WorkingDir)
	}
	return nil
}

// sha256Hash parses "sha256:…"; other algorithms are Unsupported.
func sha256Hash(s string) (v1.Hash, error) {
	h, err := v1.NewHash(s)
	if err != nil {
		return v1.Hash{}, sandbox.Invalid.Errorf("bad digest %.80q: %w", s, err)
	}
	if h.Algorithm != "sha256" {
		return v1.Hash{}, sandbox.Unsupported.Errorf("digest algorithm %.16q is not supported", h.Algorithm)
	}
	return h, nil
}
