package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/valkeyrdma/valkeyrdma/internal/servers"
)

// A server is a Valkey of the soak's own, with the same port for TCP and RDMA.
type server struct {
	*servers.Server
	name string
}

func newServer(name, dir, host string, died func(*server), args ...string) (*server, error) {
	port, err := servers.NewPort(host)
	if err != nil {
		return nil, err
	}
	home := filepath.Join(dir, name)
	s := &server{servers.New(host, port, port, home, args...), name}
	s.OnDeath(func() { died(s) })
	return s, os.Mkdir(home, 0o755)
}

// start returns when the server answers and has loaded what it had.
func (s *server) start() error {
	if err := s.Begin(); err != nil {
		return err
	}
	if err := s.Await(90 * time.Second); err != nil {
		return err
	}
	return servers.Wait(90*time.Second, s.name+" to have loaded its data", func() (bool, error) {
		pong, err := s.Do("PING")
		return err == nil && pong == "PONG", nil
	})
}

func (s *server) role() string    { return s.Info("role") }
func (s *server) clusterOK() bool { return s.Info("cluster_state", "CLUSTER", "INFO") == "ok" }
func (s *server) isReplicaOK() bool {
	return s.Info("master_link_status") == "up"
}

// clients returns the identities of the soak's RDMA connections to the server.
func (s *server) clients() (ids []string) {
	text, _ := s.Do("CLIENT", "LIST")
	for line := range strings.Lines(text) {
		if id, _, ok := strings.Cut(strings.TrimPrefix(line, "id="), " "); ok && strings.Contains(line, " name="+clientName+" ") {
			ids = append(ids, id)
		}
	}
	return ids
}

// masterOf returns the index of the replica's master among nodes, or -1.
func masterOf(nodes []*server, replica *server) int {
	if replica.role() != "slave" {
		return -1
	}
	addr := net.JoinHostPort(replica.Info("master_host"), replica.Info("master_port"))
	for i, s := range nodes {
		if s.Addr == addr {
			return i
		}
	}
	return -1
}

// formCluster makes a cluster of three masters and three replicas.
func formCluster(nodes []*server) error {
	args := []string{"--cluster", "create"}
	for _, s := range nodes {
		args = append(args, s.Addr)
	}
	out, err := exec.Command(servers.Program("valkey-cli"), append(args, "--cluster-replicas", "1", "--cluster-yes")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("valkey-cli --cluster create: %w\n%s", err, out)
	}
	return servers.Wait(2*time.Minute, "the cluster to be complete", func() (bool, error) {
		replicas := 0
		for _, s := range nodes {
			if !s.clusterOK() {
				return false, nil
			}
			if s.isReplicaOK() {
				replicas++
			}
		}
		return replicas == 3, nil
	})
}
