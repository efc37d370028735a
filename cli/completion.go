package cli

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
)

func (a *app) completionCmd() *cobra.Command {
	return &cobra.Command{
		Use:       "completion bash|zsh|fish",
		Short:     "Print a script that completes verbs, flags and names in a shell",
		Long:      "Print a script for a shell, such as:\n  source <(viv completion bash)\n  viv completion zsh > \"${fpath[1]}/_viv\"\n  viv completion fish > ~/.config/fish/completions/viv.fish",
		Args:      exactly("SHELL"),
		ValidArgs: []string{"bash", "zsh", "fish"},
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(a.Out, true)
			case "zsh":
				return root.GenZshCompletion(a.Out)
			case "fish":
				return root.GenFishCompletion(a.Out, true)
			}
			return usage("there is no completion for %q: there is for bash, zsh and fish", args[0])
		},
	}
}

// completionTime bounds how long a key press waits for the daemon.
const completionTime = 2 * time.Second

func (a *app) completeSandboxes(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 && !strings.HasSuffix(cmd.Use, "...") {
		return nil, cobra.ShellCompDirectiveDefault
	}
	var out []string
	a.sandboxNames(cmd.Context(), func(name, detail string) {
		if strings.HasPrefix(name, prefix) {
			out = append(out, cobra.CompletionWithDesc(name, detail))
		}
	})
	return out, cobra.ShellCompDirectiveNoFileComp
}

// sandboxNames calls fn with the names of the living, and the ids of those that
// have none.
func (a *app) sandboxNames(ctx context.Context, fn func(name, detail string)) {
	c, err := a.client()
	if err != nil {
		return
	}
	defer c.Close()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()
	list, err := c.List(ctx, &v1.ListSandboxesRequest{Limit: 1000})
	if err != nil {
		return
	}
	for _, s := range list {
		name := s.Spec.GetName()
		if name == "" {
			name = s.Id
		}
		fn(name, clean(s.Spec.GetImage()+", "+s.Stage))
	}
}

func (a *app) completeImages(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	c, err := a.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer c.Close()
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()
	list, err := c.ListImages(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, i := range list {
		for _, t := range i.Tags {
			if strings.HasPrefix(t, prefix) {
				out = append(out, cobra.CompletionWithDesc(clean(t), bytesText(i.Size)))
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
