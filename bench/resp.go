package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
)

// raw is a program that uses a connection itself. It knows what each reply will be, and how long.
type raw struct {
	c   net.Conn
	buf []byte
}

func newRaw(c net.Conn) *raw { return &raw{c: c} }

// A reply is what a command must be answered with: a beginning, and so many bytes in all.
type reply struct {
	begin []byte
	size  int
}

func (p reply) times(n int) reply { return reply{p.begin, p.size * n} }

var okReply = reply{[]byte("+OK\r\n"), 5}

func command(args ...[]byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&b, "$%d\r\n", len(a))
		b.Write(a)
		b.WriteString("\r\n")
	}
	return b.Bytes()
}

func getCommand() []byte { return command([]byte("GET"), []byte(theKey)) }

func getReply(size int) reply {
	begin := fmt.Appendf(nil, "$%d\r\n", size)
	return reply{begin, len(begin) + size + 2}
}

func setCommand(size int) []byte { return command([]byte("SET"), []byte(theKey), payload(size)) }

func payload(size int) []byte { return bytes.Repeat([]byte{'x'}, size) }

// roundTrip sends a request and takes its reply.
func (r *raw) roundTrip(request []byte, want reply) error {
	if _, err := r.c.Write(request); err != nil {
		return err
	}
	if len(r.buf) < want.size {
		r.buf = make([]byte, want.size)
	}
	got := r.buf[:want.size]
	if _, err := io.ReadFull(r.c, got); err != nil {
		return err
	}
	if !bytes.HasPrefix(got, want.begin) {
		return fmt.Errorf("the reply is %.40q, want %q", got, want.begin)
	}
	return nil
}
