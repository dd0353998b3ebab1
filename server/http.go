package server

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// maxScrapes bounds the requests for metrics that are answered at once.
const maxScrapes = 4

// httpFace serves /metrics, /healthz (the process runs), /readyz (the node serves) and
// what routers ask.
type httpFace struct {
	listener net.Listener
	server   *http.Server
}

func newHTTP(l net.Listener, n *node) *httpFace {
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(&exporter{n})
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("ok\n")) // the client went away: nothing to tell it
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if state := n.state(); state == stateStopping {
			http.Error(w, state, http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	})
	n.routerFace(mux)
	return &httpFace{l, &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
	}}
}

// serve answers until close.
func (h *httpFace) serve() error {
	if err := h.server.Serve(h.listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// close waits for answers under way until ctx ends, then cuts them.
func (h *httpFace) close(ctx context.Context) error {
	err := h.server.Shutdown(ctx)
	return errors.Join(err, h.server.Close())
}
