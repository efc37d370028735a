// Package bench measures a daemon as any client sees it, and other ways to run
// a contained command on the same machine in the same run.
//
// Figures are taken with a daemon at work, never in a test: the tests of this
// package hold the arithmetic and the form, not the speed.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

// Benches are the names that Run knows.
var Benches = []string{"tti", "exec", "density", "churn", "io", "net"}

// MaxN bounds Options.N.
const MaxN = 1_000_000

// MaxRate bounds Options.Rate.
const MaxRate = 1000

// Options say what to measure.
type Options struct {
	Bench   string
	N       int      // how many times; 0 is the bench's own
	Runtime string   // "" is gvisor
	Image   string   // on the node already
	Rate    float64  // arrivals per second of tti; 0 is one after the other
	PoolOff bool     // ask for machines of a size that the pool does not hold
	Peers   []string // nil: those that the bench can be compared with
	JSON    bool

	Server, Token string
	Out, Err      io.Writer

	alone bool       // tests: no peers at all
	quick bool       // tests: nothing is waited for, and less is moved
	host  *namespace // tests: in place of the host's, for net
}

// defaultN is how many times each bench does its thing.
var defaultN = map[string]int{"tti": 50, "exec": 200, "density": 100, "churn": 400, "io": 3, "net": 10}

// check fills in what was left out and refuses what makes no sense. Errors are
// Invalid.
func (o *Options) check() error {
	if !slices.Contains(Benches, o.Bench) {
		return sandbox.Invalid.Errorf("there is no bench %q: they are %s", o.Bench, strings.Join(Benches, ", "))
	}
	if o.N < 0 || o.N > MaxN {
		return sandbox.Invalid.Errorf("n of %d is not between 1 and %d", o.N, MaxN)
	}
	if o.N == 0 {
		o.N = defaultN[o.Bench]
	}
	if math.IsNaN(o.Rate) || o.Rate < 0 || o.Rate > MaxRate {
		return sandbox.Invalid.Errorf("rate of %g is not between 0 and %d per second", o.Rate, MaxRate)
	}
	if o.PoolOff && o.Bench != "tti" && o.Bench != "churn" {
		return sandbox.Invalid.Errorf("bench %s makes nothing of pool-off: tti and churn do", o.Bench)
	}
	for _, p := range o.Peers {
		if !slices.Contains(Peers, p) {
			return sandbox.Invalid.Errorf("there is no peer %q: they are %s", p, strings.Join(Peers, ", "))
		}
	}
	able := peersOf[o.Bench]
	if len(o.Peers) == 0 {
		o.Peers = able
	}
	for _, p := range o.Peers {
		if !slices.Contains(able, p) {
			return sandbox.Invalid.Errorf("bench %s cannot be compared with %s", o.Bench, p)
		}
	}
	if o.alone {
		o.Peers = nil
	}
	o.Peers = slices.Sorted(slices.Values(o.Peers)) // the caller's stays as it is
	o.Peers = slices.Compact(o.Peers)
	if o.Runtime == "" {
		o.Runtime = sandbox.RuntimeGVisor
	}
	return nil
}

// run is one run of one bench.
type run struct {
	Options
	c    *client.Client
	tag  string
	info *v1.InfoResponse
	res  *Result
}

// benchTag marks the sandboxes of a run, so that all of them are found at its
// end.
const benchTag = "vivarium.bench"

// cleanupTimeout bounds the end of a run.
const cleanupTimeout = 2 * time.Minute

// Run measures and prints the result. What it made is gone when it returns,
// also when ctx ends it early.
func Run(ctx context.Context, o Options) error {
	res, err := Measure(ctx, o)
	if err != nil {
		return err
	}
	if o.JSON {
		return res.WriteJSON(o.Out)
	}
	return res.WriteText(o.Out)
}

// Measure is Run without the print.
func Measure(ctx context.Context, o Options) (_ *Result, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	c, err := client.New(o.Server, o.Token)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	r := &run{Options: o, c: c, tag: ulid.Make().String(), res: newResult(o)}
	if r.info, err = c.Info(ctx); err != nil {
		return nil, err
	}
	if _, err := c.GetImage(ctx, o.Image); err != nil {
		if errors.Is(err, sandbox.NotFound) {
			return nil, sandbox.NotFound.Errorf("image %s is not on this node", o.Image).
				WithHint("make it with `viv image base`, or name another with --image")
		}
		return nil, err
	}
	r.busy()
	defer func() {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		err = errors.Join(err, r.removeAll(cctx))
	}()
	if err := map[string]func(context.Context) error{
		"tti": r.tti, "exec": r.exec, "density": r.density, "churn": r.churn, "io": r.io, "net": r.net,
	}[o.Bench](ctx); err != nil {
		return nil, err
	}
	return r.res, nil
}

// say tells on the error stream what is being done.
func (r *run) say(format string, args ...any) {
	if r.Err != nil {
		fmt.Fprintf(r.Err, format+"\n", args...)
	}
}

// oddMemory is a memory limit that no pool is made for.
const oddMemory = 777 << 20

// spec is a sandbox that lives until it is removed.
func (r *run) spec(command ...string) *v1.SandboxSpec {
	s := &v1.SandboxSpec{
		Image: r.Image, Runtime: r.Runtime, Command: command,
		Tags: map[string]string{benchTag: r.tag},
		// long enough for any bench, so that nothing outlives a lost one by much
		Timeout: durationpb.New(2 * time.Hour),
	}
	if r.PoolOff {
		s.Resources = &v1.Resources{MemoryLimit: oddMemory}
	}
	return s
}

// small is a spec with the least guaranteed, so that as many fit on the node as
// do in fact.
func (r *run) small() *v1.SandboxSpec {
	s := r.spec()
	s.Resources = &v1.Resources{CpuRequestMilli: 1, MemoryRequest: 8 << 20}
	return s
}

// remove ends and forgets one sandbox. One that is gone is fine.
func (r *run) remove(ctx context.Context, id string) error {
	if err := r.c.Remove(ctx, id, true); err != nil && !errors.Is(err, sandbox.NotFound) {
		return err
	}
	return nil
}

// removeAll removes what the run made.
func (r *run) removeAll(ctx context.Context) error {
	list, err := r.c.List(ctx, &v1.ListSandboxesRequest{Tags: map[string]string{benchTag: r.tag}, Ended: true})
	if err != nil {
		return fmt.Errorf("list what the bench made: %w", err)
	}
	list = slices.DeleteFunc(list, func(s *v1.Sandbox) bool { return s.Removed })
	return parallel(ctx, 8, len(list), func(ctx context.Context, i int) error { return r.remove(ctx, list[i].Id) })
}

// runExec runs a command and expects it to succeed.
func (r *run) runExec(ctx context.Context, id string, argv []string, stdout io.Writer) error {
	e, err := r.c.RunExec(ctx, id, "", &v1.ExecSpec{Argv: argv}, stdout, nil)
	if err != nil {
		return err
	}
	if e.GetState() != "exited" || e.GetExit().GetCode() != 0 {
		return sandbox.Internal.Errorf("%s in %s: %s with status %d %s", argv[0], id, e.GetState(), e.GetExit().GetCode(), e.GetExit().GetError())
	}
	return nil
}
