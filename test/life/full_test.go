package life

import (
	"fmt"
	"strings"
	"testing"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

// A node with room for four, a line of two, and little patience.
const small = `
pool: {size: 0}
reserve: {disk: 16MiB, memory: 64MiB, cpu: 100m}
defaults: {cpu_request: 10m, memory_request: 32MiB, memory_limit: 256MiB, network: none}
limits: {max_sandboxes: 4, max_per_tenant: 3, queue: 2}
deadlines: {queue: 8s, ready: 2s}
network: {pool: 2}
`

func TestFull(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, small)
	e := &env{Daemon: d, c: d.Client}

	// A probe that never passes: it ends with the reason, and the create says so
	// (report 59).
	s := spec()
	s.Probe = &v1.Probe{Command: []string{"sh", "-c", "exit 9"}}
	sb, err := e.c.Create(t.Context(), s, client.CreateOptions{Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	e.removeLater(t, sb.Id)
	_, err = e.c.Wait(t.Context(), sb.Id, "ready", patience)
	is(t, "wait until ready", err, sandbox.Timeout, "exited with 9", false)
	if c := e.death(t, sb.Id); c.Reason != "failed" || c.Stage != "ready" || c.ErrorKind != "timeout" || !strings.Contains(c.Message, "not ready after 2s") {
		t.Errorf("certificate %v", c)
	}
	s.Probe = &v1.Probe{TcpPort: 99}
	_, err = e.c.Create(t.Context(), s, client.CreateOptions{WaitReady: true})
	is(t, "create until ready", err, sandbox.Timeout, "port 99", false)
	s.Probe = &v1.Probe{Command: []string{"no-such-command"}}
	_, err = e.c.Create(t.Context(), s, client.CreateOptions{WaitReady: true})
	is(t, "a probe that is no command", err, sandbox.Timeout, "no-such-command", false)

	// A20: a tenant that takes all it may does not take it from others.
	var mine []string
	for range 3 {
		mine = append(mine, e.create(t, spec()).Id)
	}
	for range 3 {
		_, err := e.c.Create(t.Context(), spec(), client.CreateOptions{})
		is(t, "one more than the tenant may", err, sandbox.Exhausted, "3", true)
	}
	other := e.tenant(t, "other")
	fourth := other.create(t, spec())

	// The node is full: others wait in line, visibly, and in order.
	var line []*v1.Sandbox
	for range 2 {
		sb, err := other.c.Create(t.Context(), spec(), client.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		other.removeLater(t, sb.Id)
		line = append(line, sb)
	}
	for _, sb := range line {
		got, err := other.c.Get(t.Context(), sb.Id)
		if err != nil || got.Stage != "queued" || got.StageDeadline == nil {
			t.Errorf("in line: %v, %v", got, err)
		}
	}
	third := e.tenant(t, "third")
	_, err = third.c.Create(t.Context(), spec(), client.CreateOptions{Wait: true})
	is(t, "a line that is full", err, sandbox.Exhausted, "2 creates wait", true)
	if _, err := e.c.Stop(t.Context(), mine[0], 0); err != nil {
		t.Fatal(err)
	}
	if _, err := other.c.Wait(t.Context(), line[0].Id, "running", patience); err != nil {
		t.Errorf("the first in line: %v", err)
	}
	// Whoever is still in line when its time is over is told, with the numbers.
	_, err = other.c.Wait(t.Context(), line[1].Id, "running", patience)
	is(t, "the second in line", err, sandbox.Exhausted, "4 sandboxes of at most 4 are alive", true)
	if c := other.death(t, line[1].Id); c.Reason != "failed" || c.Stage != "queued" || c.ErrorKind != "exhausted" || c.Hint == "" {
		t.Errorf("certificate %v", c)
	}
	// One that is stopped in line is gone at once.
	sb, err = third.c.Create(t.Context(), spec(), client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	third.removeLater(t, sb.Id)
	if got, err := third.c.Stop(t.Context(), sb.Id, 0); err != nil || got.Death.GetReason() != "stopped" || got.Death.Stage != "queued" {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := other.c.Get(t.Context(), fourth.Id); err != nil || got.Stage != "running" {
		t.Errorf("%v, %v", got, err)
	}

	// Started again with more sandboxes than it now may have, it keeps them, and
	// takes no more.
	d.Stop()
	setConfig(t, d, strings.Replace(small, "max_sandboxes: 4", "max_sandboxes: 1", 1)+"\n")
	d.Run()
	e.c = d.Client
	if _, exit := e.run(t, mine[1], "true"); exit.Code != 0 {
		t.Error(exit)
	}
	_, err = third.c.Create(t.Context(), spec(), client.CreateOptions{Wait: true})
	is(t, "a node that is over full", err, sandbox.Exhausted, "at most 1", true)

	// With less disk than is kept in reserve nothing new starts, and what runs
	// goes on.
	d.Stop()
	setConfig(t, d, strings.Replace(small, "disk: 16MiB", fmt.Sprint("disk: ", int64(1)<<45), 1))
	d.Run()
	e.c = d.Client
	_, err = e.c.Create(t.Context(), spec(), client.CreateOptions{Wait: true})
	is(t, "no disk left", err, sandbox.Exhausted, "reserve", true)
	if _, exit := e.run(t, mine[1], "true"); exit.Code != 0 {
		t.Error(exit)
	}
	if _, err := e.c.Stop(t.Context(), mine[1], 0); err != nil {
		t.Error(err)
	}
}
