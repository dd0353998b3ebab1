package server

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc/stats"
)

// tracing sends a span per call to a collector, in the background and in
// batches; what the collector does not take is dropped. Calls carry their
// caller's trace in W3C headers.
type tracing struct {
	provider *sdktrace.TracerProvider
	log      *slog.Logger
}

// traceWithin bounds one export, and what is left at the end: traces are not
// worth a longer stop.
const traceWithin = 2 * time.Second

// openTracing starts tracing, or returns nil for no endpoint: then nothing of it
// is on the path of any call. TLS is used unless the endpoint is this machine.
func openTracing(ctx context.Context, endpoint string, id identity, log *slog.Logger) (*tracing, error) {
	if endpoint == "" {
		return nil, nil
	}
	// The library reports exports that failed to one handler of the process.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("traces are lost", "endpoint", endpoint, "error", err) }))
	opts := []otlptracegrpc.Option{
		otlptracegrpc.WithEndpoint(endpoint), otlptracegrpc.WithTimeout(traceWithin),
		otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{}),
	}
	if local, err := loopback(endpoint); err == nil && local {
		opts = append(opts, otlptracegrpc.WithInsecure())
	}
	exporter, err := otlptracegrpc.New(ctx, opts...)
	if err != nil {
		return nil, fmt.Errorf("otlp-endpoint %s: %w", endpoint, err)
	}
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter),
		sdktrace.WithResource(resource.NewSchemaless(
			attribute.String("service.name", "kvtier"),
			attribute.String("service.instance.id", hex.EncodeToString(id.node[:])),
		)),
	)
	return &tracing{provider, log}, nil
}

// handler traces gRPC calls; nil where tracing is off.
func (t *tracing) handler() stats.Handler {
	if t == nil {
		return nil
	}
	return otelgrpc.NewServerHandler(
		otelgrpc.WithTracerProvider(t.provider),
		otelgrpc.WithPropagators(propagation.TraceContext{}),
	)
}

// close sends what is left, within traceWithin and ctx. Spans that nobody takes are
// lost: that is logged and no failure of the node.
func (t *tracing) close(ctx context.Context) {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, traceWithin)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		t.log.Warn("traces are lost", "error", err)
	}
}
