package doctor

import (
	"time"
)

// released is when the gVisor inside was: no clock is right that is before it.
var released = time.Date(2026, time.September, 5, 0, 0, 0, 0, time.UTC)

func (d *doctor) clock() {
	now := d.now().UTC()
	detail := now.Format(time.RFC3339)
	switch {
	case now.Before(released) || now.Year() > 2100:
		d.bad(Error, "clock", detail, "certificates and package signatures do not verify, and times in records are wrong",
			"timedatectl set-ntp true, or date -s with the right time")
	case !d.sync():
		d.bad(Note, "clock", detail+", not synchronised", "times in records drift from those of other machines", "apt-get install systemd-timesyncd && timedatectl set-ntp true")
	default:
		d.ok("clock", detail)
	}
}

// tools are what only some commands need.
func (d *doctor) tools() {
	tool := ""
	for _, name := range []string{"mmdebstrap", "debootstrap", "/usr/sbin/debootstrap"} {
		if p, err := d.look(name); err == nil {
			tool = p
			break
		}
	}
	if tool == "" {
		d.bad(Note, "base images", "neither mmdebstrap nor debootstrap is installed", "viv image base does not work; pulling and loading images does", "apt-get install mmdebstrap")
	} else {
		d.ok("base images", tool)
	}
	if d.exists("/run/systemd/system") {
		d.ok("systemd", "")
	} else {
		d.bad(Note, "systemd", "it does not run this host", "the daemon is not started at boot by the unit that comes with it", "start viv serve from what starts the host's other services")
	}
	if d.exists("/dev/kvm") {
		d.ok("kvm", "/dev/kvm exists; gVisor needs none, and this version has no VM runtime")
	} else {
		d.ok("kvm", "none; gVisor needs none, and this version has no VM runtime")
	}
	if inUse(d.DataDir) {
		d.ok("daemon", "one is running on "+d.DataDir)
	}
}
