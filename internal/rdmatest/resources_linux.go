package rdmatest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// Resources counts what the processes have of the kernel's RDMA objects: "qp", "cq", "mr", "pd" and "cm_id", as rdma-resource(8) lists
// them. The kernel remembers the thread that made an object and gives that thread's number as the pid, so every thread of a
// process is looked for. An object whose thread has ended has no pid, and counts as one of theirs.
func Resources(pids ...int) (map[string]int, error) {
	threads := make(map[string]bool)
	for _, pid := range pids {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			return nil, err
		}
		for _, entry := range entries {
			threads[entry.Name()] = true
		}
	}
	counts := make(map[string]int)
	for _, kind := range []string{"qp", "cq", "mr", "pd", "cm_id"} {
		out, err := exec.Command("rdma", "resource", "show", kind).Output()
		if err != nil {
			return nil, fmt.Errorf("rdma resource show %s: %w", kind, err)
		}
		for line := range strings.Lines(string(out)) {
			_, owner, known := strings.Cut(line, " pid ")
			thread, _, _ := strings.Cut(owner, " ")
			// The kernel's own objects have a comm in brackets and no pid.
			if known && threads[thread] || !known && !strings.Contains(line, " comm [") {
				counts[kind]++
			}
		}
	}
	return counts, nil
}
