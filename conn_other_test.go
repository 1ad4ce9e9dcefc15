//go:build !linux || !cgo

package valkeyrdma

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDialUnsupported(t *testing.T) {
	conn, err := DialCtxFn(context.Background(), "10.0.0.7:6378", nil, nil)
	requireDialError(t, conn, err)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorIs(t, err, ErrUnsupported)
	require.ErrorContains(t, err, "cgo")
}
