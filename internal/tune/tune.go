// Package tune holds what only this project's benchmark changes about connections, to show what it is good for.
package tune

import "sync/atomic"

// OneReceiveBuffer makes connections that are dialled while it is set do with a single receive buffer.
var OneReceiveBuffer atomic.Bool
