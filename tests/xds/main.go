// An xDS server of go-control-plane that hands out rules as it is told to.
//
// With the flags -certificate, -key and -client-authority it serves TLS, and wants certificates of that authority from clients.
// It prints its port. Then each line of its standard input is a set of rules to hand out: "good LIMIT", or "bad". For each answer it
// prints "ack VERSION", or "nack VERSION MESSAGE".
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"strings"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/v3"
	ratelimit "github.com/envoyproxy/go-control-plane/ratelimit/config/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// How many rules a set has.
const rules = 5000

// The node that asks.
const node = "envoy-ratelimit"

// Files in PEM.
var (
	certificate     = flag.String("certificate", "", "certificate to serve TLS with; without it there is no TLS")
	key             = flag.String("key", "", "its private key")
	clientAuthority = flag.String("client-authority", "", "authority of the certificates that clients must show")
)

type hash struct{}

func (hash) ID(node *core.Node) string { return node.GetId() }

func descriptors(limit uint32) []*ratelimit.RateLimitDescriptor {
	all := make([]*ratelimit.RateLimitDescriptor, rules)
	for i := range all {
		all[i] = &ratelimit.RateLimitDescriptor{
			Key:   "k",
			Value: fmt.Sprintf("v%d", i),
			RateLimit: &ratelimit.RateLimitPolicy{
				Unit:            ratelimit.RateLimitUnit_HOUR,
				RequestsPerUnit: limit,
			},
		}
	}
	return all
}

func answered(_ int64, request *discovery.DiscoveryRequest) error {
	switch {
	case request.GetResponseNonce() == "":
	case request.GetErrorDetail() != nil:
		message := strings.ReplaceAll(request.GetErrorDetail().GetMessage(), "\n", " | ")
		fmt.Printf("nack %s %s\n", request.GetVersionInfo(), message)
	default:
		fmt.Printf("ack %s\n", request.GetVersionInfo())
	}
	return nil
}

func options() []grpc.ServerOption {
	if *certificate == "" {
		return nil
	}
	pair, err := tls.LoadX509KeyPair(*certificate, *key)
	if err != nil {
		log.Fatal(err)
	}
	authority, err := os.ReadFile(*clientAuthority)
	if err != nil {
		log.Fatal(err)
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(authority) {
		log.Fatal("no certificate in ", *clientAuthority)
	}
	return []grpc.ServerOption{grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{pair},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    authorities,
	}))}
}

func main() {
	flag.Parse()
	snapshots := cache.NewSnapshotCache(true, hash{}, nil)
	service := server.NewServer(context.Background(), snapshots, server.CallbackFuncs{StreamRequestFunc: answered})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	grpcServer := grpc.NewServer(options()...)
	discovery.RegisterAggregatedDiscoveryServiceServer(grpcServer, service)
	go func() { log.Fatal(grpcServer.Serve(listener)) }()
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)

	lines := bufio.NewScanner(os.Stdin)
	for version := 1; lines.Scan(); version++ {
		var limit uint32 = 1
		fmt.Sscanf(lines.Text(), "good %d", &limit)
		config := &ratelimit.RateLimitConfig{Name: "lab", Domain: "lab", Descriptors: descriptors(limit)}
		if lines.Text() == "bad" {
			config.Descriptors[rules/2].RateLimit.Unit = ratelimit.RateLimitUnit_UNKNOWN
		}
		snapshot, err := cache.NewSnapshot(fmt.Sprint(version), map[resource.Type][]types.Resource{
			resource.RateLimitConfigType: {config},
		})
		if err != nil {
			log.Fatal(err)
		}
		if err := snapshots.SetSnapshot(context.Background(), node, snapshot); err != nil {
			log.Fatal(err)
		}
	}
}
