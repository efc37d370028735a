package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"vivarium/sandbox"
)

func (a *app) doctorCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what this host lacks or has wrong, the effect, and the exact fix",
		Args:  exactly(),
	}
	src := addConfigFlags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the findings as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if a.hooks.Doctor == nil {
			return sandbox.Unsupported.Errorf("this build has no doctor")
		}
		cfg, err := src.load(a)
		if err != nil {
			return err
		}
		findings := a.hooks.Doctor(cmd.Context(), cfg)
		bad := 0
		for _, f := range findings {
			if !f.OK && f.Severity != "warning" {
				bad++
			}
		}
		if asJSON {
			err = a.writeJSON(findings)
		} else {
			err = a.printFindings(findings)
		}
		if err == nil && bad > 0 {
			return &exitCode{code: exitError}
		}
		return err
	}
	return cmd
}

func (a *app) printFindings(findings []Finding) error {
	for _, f := range findings {
		mark := "ok"
		if !f.OK {
			mark = f.Severity
			if mark == "" {
				mark = "error"
			}
		}
		s := fmt.Sprintf("%-8s %s", clean(mark), clean(f.Name))
		if f.Detail != "" {
			s += ": " + clean(f.Detail)
		}
		s += "\n"
		if !f.OK {
			if f.Effect != "" {
				s += "         effect: " + clean(f.Effect) + "\n"
			}
			if f.Fix != "" {
				s += "         fix:    " + clean(f.Fix) + "\n"
			}
		}
		if err := printed(a.Out, s); err != nil {
			return err
		}
	}
	return nil
}
