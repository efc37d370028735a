package agent

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

type process struct{ pid, ppid, pgrp, session int }

// processes lists what /proc shows.
func processes() []process {
	d, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer d.Close()
	var all []process
	for {
		names, err := d.Readdirnames(1024)
		for _, n := range names {
			pid, perr := strconv.Atoi(n)
			if perr != nil {
				continue
			}
			if p, ok := stat(pid); ok {
				all = append(all, p)
			}
		}
		if err != nil {
			return all
		}
	}
}

// stat reads /proc/PID/stat. The name in it may hold anything, so fields are
// counted from the last parenthesis.
func stat(pid int) (process, bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return process{}, false
	}
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return process{}, false
	}
	f := bytes.Fields(b[i+1:])
	if len(f) < 4 || f[0][0] == 'Z' || f[0][0] == 'X' {
		return process{}, false
	}
	p := process{pid: pid}
	p.ppid, _ = strconv.Atoi(string(f[1]))
	p.pgrp, _ = strconv.Atoi(string(f[2]))
	p.session, _ = strconv.Atoi(string(f[3]))
	return p, true
}

// marked says whether a process carries the cookie of exec id.
func (a *Agent) marked(pid int, id string) bool {
	name := "/proc/" + strconv.Itoa(pid) + "/environ"
	b, err := os.ReadFile(name)
	if err != nil {
		var st unix.Stat_t
		if unix.Stat(name, &st) != nil || st.Uid == 0 {
			return false
		}
		err = a.files.asReal(st.Uid, st.Gid, func() (err error) {
			b, err = os.ReadFile(name)
			return err
		})
	}
	return err == nil && bytes.Contains(append([]byte{0}, b...), []byte("\x00"+Cookie+"="+id+"\x00"))
}

// killTree kills the process root, its group, its session, whatever descends
// from it, and what carries its cookie, until none is left or two seconds have
// passed: what forks faster than that is left to the sandbox's limits.
//
// Everything found is stopped first, and killed when nothing new turns up: a
// parent killed before its children were seen would hand them to process 1.
func (a *Agent) killTree(root int, id string) {
	if root <= 1 {
		return
	}
	self := os.Getpid()
	mine := map[int]bool{root: true} // also the dead: their children are ours
	unix.Kill(-root, unix.SIGSTOP)
	end := time.Now().Add(2 * time.Second)
	for quiet := 0; quiet < 2 && time.Now().Before(end); {
		all := processes()
		var found []int
		for again := true; again; {
			again = false
			for _, p := range all {
				if p.pid <= 1 || p.pid == self || mine[p.pid] {
					continue
				}
				if mine[p.ppid] || p.session == root || p.pgrp == root || mine[p.session] || p.ppid == 1 && a.marked(p.pid, id) {
					mine[p.pid], again = true, true
					found = append(found, p.pid)
				}
			}
		}
		if len(found) > 0 && quiet == 0 {
			for _, pid := range found {
				unix.Kill(pid, unix.SIGSTOP)
			}
			continue
		}
		alive := false
		for _, p := range all {
			if mine[p.pid] {
				alive = true
				unix.Kill(p.pid, unix.SIGKILL)
			}
		}
		if alive {
			time.Sleep(2 * time.Millisecond)
		} else {
			quiet++
		}
	}
	unix.Kill(-root, unix.SIGKILL)
}
