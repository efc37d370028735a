package doctor

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"vivarium/cgroup"
	"vivarium/sandbox"
)

// controllers that limits need.
var controllers = []string{"cpu", "memory", "pids"}

const cgroupDir = "/sys/fs/cgroup"

// cgroups looks at the controllers. With v1 each is a hierarchy of its own; see
// cgroups(7).
func (d *doctor) cgroups() {
	const effect = "sandboxes cannot be limited and do not start"
	v2, err := d.read(cgroupDir + "/cgroup.controllers")
	v1 := d.exists(cgroupDir+"/memory") || d.exists(cgroupDir+"/cpu") || d.exists(cgroupDir+"/pids")
	switch {
	case err == nil:
		var missing []string
		for _, c := range controllers {
			if !slices.Contains(strings.Fields(v2), c) {
				missing = append(missing, c)
			}
		}
		if missing == nil {
			d.ok("cgroup controllers", "v2: "+v2)
			return
		}
		d.bad(Error, "cgroup controllers", fmt.Sprintf("v2, without %s (there are: %s)", strings.Join(missing, ", "), v2), effect, d.cgroupFix(missing, true))
	case v1:
		var missing []string
		for _, c := range append([]string{"cpuacct"}, controllers...) {
			if !d.exists(cgroupDir + "/" + c) {
				missing = append(missing, c)
			}
		}
		if missing != nil {
			d.bad(Error, "cgroup controllers", "v1, without "+strings.Join(missing, ", "), effect, d.cgroupFix(missing, false))
			return
		}
		d.ok("cgroup controllers", "v1: "+strings.Join(controllers, " "))
	default:
		d.bad(Error, "cgroup controllers", "nothing is mounted at "+cgroupDir, effect, "mount -t cgroup2 cgroup2 "+cgroupDir)
	}
}

// configs are the kernel's options for controllers.
var configs = map[string]string{"cpu": "CONFIG_CFS_BANDWIDTH", "cpuacct": "CONFIG_CGROUP_CPUACCT", "memory": "CONFIG_MEMCG", "pids": "CONFIG_CGROUP_PIDS"}

// cgroupFix says how to get controllers, which depends on why they are missing.
func (d *doctor) cgroupFix(missing []string, v2 bool) string {
	all, err := d.read("/proc/cgroups")
	if err != nil {
		return "mount -t proc proc /proc"
	}
	var absent, off, unmounted []string
	for _, c := range missing {
		switch enabled, known := controller(all, c); {
		case !known:
			absent = append(absent, configs[c])
		case !enabled:
			off = append(off, "cgroup_enable="+c)
		default:
			unmounted = append(unmounted, c)
		}
	}
	var fix []string
	if absent != nil {
		fix = append(fix, "use a kernel with "+strings.Join(absent, ", "))
	}
	if off != nil {
		fix = append(fix, "add "+strings.Join(off, " ")+" to the kernel's command line (GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub) and reboot")
	}
	for _, c := range unmounted {
		if v2 {
			fix = append(fix, c+" is held by a v1 hierarchy, or not delegated to this container: add systemd.unified_cgroup_hierarchy=1 to the kernel's command line and reboot, or run outside of the container")
			continue
		}
		fix = append(fix, fmt.Sprintf("mkdir -p %s/%s && mount -t cgroup -o %[2]s cgroup %[1]s/%[2]s", cgroupDir, c))
	}
	return strings.Join(fix, "; ")
}

func (d *doctor) mounts() string {
	s, _ := d.read("/proc/self/mounts")
	return s
}

// controller finds one in the table of /proc/cgroups: name, hierarchy, number
// of groups, enabled.
func controller(table, name string) (enabled, known bool) {
	for line := range strings.Lines(table) {
		if f := strings.Fields(line); len(f) >= 4 && f[0] == name {
			return f[3] == "1", true
		}
	}
	return false, false
}

// tryCgroups makes a group with every kind of limit and removes it.
func (d *doctor) tryCgroups() {
	err := tryGroup(fmt.Sprintf("/viv-doctor-%d", os.Getpid()))
	if err != nil {
		fix := sandbox.HintOf(err)
		if fix == "" {
			fix = "mount -o remount,rw " + cgroupDir + "; in a container, start it with --privileged --cgroupns=host"
		}
		d.bad(Error, "cgroup limits", err.Error(), "sandboxes cannot be limited and do not start", fix)
		return
	}
	d.ok("cgroup limits", cgroup.Mode()+": made, limited, read and removed a group")
}

func tryGroup(path string) (err error) {
	p, err := cgroup.OpenParent(path, cgroup.Limits{MemoryLimit: 1 << 30})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Remove()) }()
	g, err := p.New("try", cgroup.Limits{CPUWeight: 100, CPULimit: 500, MemoryRequest: 1 << 20, MemoryLimit: 64 << 20, Pids: 64})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Remove()) }()
	_, err = g.Stats()
	return err
}
