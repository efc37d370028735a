package doctor

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// idFiles say who has which users and groups: passwd(5) and group(5) name one in
// their third field, subuid(5) and subgid(5) a range in the second and third.
var idFiles = []struct {
	path string
	sub  bool
}{{"/etc/passwd", false}, {"/etc/group", false}, {"/etc/subuid", true}, {"/etc/subgid", true}}

// users looks whether the range that sentries run as is theirs alone. Users that
// come from elsewhere, such as a directory, are not looked at: to list them can
// take for ever.
func (d *doctor) users() {
	first, last := int64(d.FirstUID), int64(d.FirstUID)+int64(d.UIDs)-1
	detail := fmt.Sprintf("%d to %d", first, last)
	const effect = "a sandbox that broke out of gVisor would have the rights of that user, and that user could end sandboxes"
	const fix = "set uids.first in the configuration to a range that nothing else has"
	good := true
	for _, f := range idFiles {
		s, err := d.read(f.path)
		if err != nil {
			continue // none is given
		}
		for line := range strings.Lines(s) {
			name, from, to, ok := idsOf(strings.TrimSpace(line), f.sub)
			if !ok || to < first || from > last {
				continue
			}
			has := strconv.FormatInt(from, 10)
			if from != to {
				has += fmt.Sprintf(" to %d", to)
			}
			d.bad(Warning, "users of sentries", fmt.Sprintf("%s, of which %q has %s (%s)", detail, name, has, f.path), effect, fix)
			good = false
			break // one of a file is enough to act
		}
	}
	for _, file := range []string{"/proc/self/uid_map", "/proc/self/gid_map"} {
		s, err := d.read(file)
		if err != nil || mapped(s, first, last) {
			continue
		}
		d.bad(Error, "users of sentries", detail+", which do not all exist here: "+file+" is "+strings.Join(strings.Fields(s), " "), "sandboxes do not start",
			"this is a container with users of its own: set uids.first and uids.count in the configuration to a range that it has, or give it more")
		good = false
	}
	if good {
		d.ok("users of sentries", detail)
	}
}

// idsOf takes a line of one of idFiles apart.
func idsOf(line string, sub bool) (name string, from, to int64, ok bool) {
	f := strings.Split(line, ":")
	if len(f) < 3 {
		return "", 0, 0, false
	}
	at := 2
	if sub {
		at = 1
	}
	from, err := strconv.ParseInt(f[at], 10, 64)
	if err != nil || from < 0 {
		return "", 0, 0, false
	}
	to = from
	if sub {
		n, err := strconv.ParseInt(f[2], 10, 64)
		if err != nil || n <= 0 || n > math.MaxUint32 || from > math.MaxUint32 {
			return "", 0, 0, false
		}
		to = from + n - 1
	}
	return f[0], from, to, true
}

// mapped says whether all of a range is in one line of a user namespace's map
// (user_namespaces(7)).
func mapped(table string, first, last int64) bool {
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) != 3 {
			continue
		}
		from, err := strconv.ParseInt(f[0], 10, 64)
		n, err2 := strconv.ParseInt(f[2], 10, 64)
		if err == nil && err2 == nil && from <= first && last-from < n {
			return true
		}
	}
	return false
}
