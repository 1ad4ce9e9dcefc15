package main

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/valkeyrdma/valkeyrdma/internal/servers"
)

// grace is how long after a disturbance operations may still begin and fail because of it: dials take up to 20 s to give up.
const grace = 20 * time.Second

// A weather knows when a target was disturbed last.
type weather struct {
	mu     sync.Mutex
	active int
	end    time.Time
	calm   time.Duration // that has been
}

func (w *weather) begin() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.active++
}

func (w *weather) over() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.active--
	w.end = time.Now()
}

// excuses tells whether an operation that began at start, and is over, may have failed because of a disturbance.
func (w *weather) excuses(start time.Time) bool { return w.since(start.Add(-grace)) }

// since tells whether there was a disturbance after t.
func (w *weather) since(t time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.active > 0 || t.Before(w.end)
}

// tick counts calm time.
func (w *weather) tick(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.active == 0 && time.Now().After(w.end.Add(grace)) {
		w.calm += d
	}
}

// disturb calls f while the sides are disturbed.
func disturb(f func() error, sides ...*side) error {
	for _, s := range sides {
		s.weather.begin()
		defer s.weather.over()
	}
	return f()
}

// chaos makes each kind of disturbance once, in random order, and again, until stop is closed.
func (k *soak) chaos(stop <-chan struct{}) {
	kinds := []struct {
		name string
		do   func() error
	}{
		{"kill the server", k.killServer},
		{"pause the server", func() error { return k.pause(k.alone, k.alone.servers[0]) }},
		{"kill connections of the server", func() error { return k.killConnections(k.alone) }},
		{"kill a master", k.killMaster},
		{"pause a node of the cluster", func() error { return k.pause(k.cluster, k.cluster.servers[k.rng.IntN(len(k.cluster.servers))]) }},
		{"kill connections of the cluster", func() error { return k.killConnections(k.cluster) }},
		{"pause the client", k.pauseClient},
		{"save the server's data", func() error { return k.save(k.alone.servers[0]) }},
		{"save the data of a node", func() error { return k.save(k.cluster.servers[k.rng.IntN(len(k.cluster.servers))]) }},
	}
	rest := func(least, most time.Duration) bool {
		select {
		case <-stop:
			return false
		case <-time.After(least + time.Duration(k.rng.Int64N(int64(most-least)))):
			return true
		}
	}
	for {
		for i, n := range k.rng.Perm(len(kinds)) {
			if !rest(3*time.Second, 8*time.Second) {
				return
			}
			begin := time.Now()
			if err := kinds[n].do(); err != nil {
				k.wrong("%s: %v", kinds[n].name, err)
				return
			}
			k.count(&k.disturbances, kinds[n].name)
			k.logf("%s: over after %.1f s", kinds[n].name, time.Since(begin).Seconds())
			// Half-way and at the end it is calm for a while, and then nothing may fail.
			if (i == len(kinds)/2 || i == len(kinds)-1) && !rest(grace+5*time.Second, grace+15*time.Second) {
				return
			}
		}
	}
}

func (k *soak) seconds(least, most float64) time.Duration {
	return time.Duration((least + (most-least)*k.rng.Float64()) * float64(time.Second))
}

// killServer kills the server while commands are under way. Writes are held back just before: over RDMA, Valkey up to 9.1.2 answers some
// before they are in the append-only file, and loses them (docs/soak.md). With the answer to CLIENT PAUSE the file has the earlier ones.
func (k *soak) killServer() error {
	return disturb(func() error {
		s := k.alone.servers[0]
		if _, err := s.Do("CLIENT", "PAUSE", "60000", "WRITE"); err != nil {
			return err
		}
		time.Sleep(k.seconds(0, 0.1))
		s.Kill()
		time.Sleep(k.seconds(0, 2))
		return s.start()
	}, k.alone)
}

func (k *soak) pause(side *side, s *server) error {
	return disturb(func() error {
		side.epoch.Add(1) // a pause that lasts long enough on a slow machine makes a replica take over
		s.Signal(syscall.SIGSTOP)
		time.Sleep(k.seconds(1, 5))
		s.Signal(syscall.SIGCONT)
		side.epoch.Add(1)
		return nil
	}, side)
}

func (k *soak) killConnections(side *side) error {
	return disturb(func() error {
		for range 1 + k.rng.IntN(4) {
			s := side.servers[k.rng.IntN(len(side.servers))]
			ids := s.clients()
			for range min(len(ids), 1+k.rng.IntN(8)) {
				if n, err := s.Do("CLIENT", "KILL", "ID", ids[k.rng.IntN(len(ids))]); err == nil && n == "1" {
					k.count(&k.disturbances, "connections killed")
				}
			}
			time.Sleep(k.seconds(0, 1))
		}
		return nil
	}, side)
}

// killMaster kills a master, waits until its replica has taken over, and starts it again as a replica.
func (k *soak) killMaster() error {
	return disturb(func() error {
		nodes := k.cluster.servers
		replicas := make(map[int]int)
		err := servers.Wait(2*time.Minute, "each master to have its replica", func() (bool, error) {
			clear(replicas)
			for i, s := range nodes {
				if m := masterOf(nodes, s); m >= 0 && s.isReplicaOK() {
					replicas[m] = i
				}
			}
			return len(replicas) == 3, nil
		})
		if err != nil {
			return err
		}
		master := k.rng.IntN(len(nodes))
		for ; ; master = (master + 1) % len(nodes) {
			if _, ok := replicas[master]; ok {
				break
			}
		}
		heir := nodes[replicas[master]]
		k.cluster.epoch.Add(1)
		defer k.cluster.epoch.Add(1)
		nodes[master].Kill()
		err = servers.Wait(2*time.Minute, heir.name+" to take over", func() (bool, error) {
			return heir.role() == "master" && heir.clusterOK(), nil
		})
		if err != nil {
			return err
		}
		if err := nodes[master].start(); err != nil {
			return err
		}
		return servers.Wait(2*time.Minute, nodes[master].name+" to be a replica, and all nodes to agree", func() (bool, error) {
			for _, s := range nodes {
				if !s.clusterOK() {
					return false, nil
				}
			}
			return nodes[master].role() == "slave" && nodes[master].isReplicaOK(), nil
		})
	}, k.cluster)
}

// save makes a process fork while RDMA writes into its memory. It excuses nothing.
func (k *soak) save(s *server) error {
	// A replica that synchronizes may have made it save already.
	if _, err := s.Do("BGSAVE", "SCHEDULE"); err != nil && !strings.Contains(err.Error(), "in progress") {
		return err
	}
	return servers.Wait(2*time.Minute, s.name+" to save its data", func() (bool, error) {
		if s.Info("rdb_bgsave_in_progress") != "0" {
			return false, nil
		}
		if status := s.Info("rdb_last_bgsave_status"); status != "ok" {
			return false, fmt.Errorf("%s: the status of BGSAVE is %q", s.name, status)
		}
		return true, nil
	})
}

// pauseClient stops this process. Somebody else has to let it go on: a child.
func (k *soak) pauseClient() error {
	return disturb(func() error {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		return exec.Command(self, "-pause", strconv.Itoa(os.Getpid()), "-for", k.seconds(1, 5).String()).Run()
	}, k.alone, k.cluster)
}

// pauseProcess is what that child does.
func pauseProcess(pid int, d time.Duration) {
	if pid != os.Getppid() {
		fmt.Fprintln(os.Stderr, "soak: -pause is for the soak's own child")
		os.Exit(2)
	}
	_ = syscall.Kill(pid, syscall.SIGSTOP)
	time.Sleep(d)
	_ = syscall.Kill(pid, syscall.SIGCONT)
}
