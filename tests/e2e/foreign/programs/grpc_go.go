// Makes calls with grpc-go, without generated code.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"hash/crc32"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const block = 65521

const retries = `{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.1s",
	"maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`

type connection struct {
	Address, CA, Certificate, Key string
	KeepaliveMS                   int64 `json:"keepalive_ms"`
	Retries                       bool
}

type call struct {
	Method, Kind, Compression string
	Requests                  []struct {
		Head []byte
		Fill int
	}
	Metadata    [][2]string
	TimeoutMS   *int64 `json:"timeout_ms"`
	Turns       bool
	CancelAfter int `json:"cancel_after"`
	LeaveAfter  int `json:"leave_after"`
	Tail        int
	Repeat      float64 `json:"repeat_seconds"`
}

type response struct {
	Head []byte `json:"head"`
	CRC  uint32 `json:"crc32"`
}

type result struct {
	Code      string            `json:"code"`
	Message   string            `json:"message"`
	Responses []response        `json:"responses"`
	Trailers  map[string]string `json:"trailers"`
	Codes     map[string]int    `json:"codes,omitempty"`
}

// Messages are bytes.
type raw struct{}

func (raw) Name() string                               { return "proto" }
func (raw) Marshal(v interface{}) ([]byte, error)      { return v.([]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error { *v.(*[]byte) = data; return nil }

func dial(to connection) *grpc.ClientConn {
	options := []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{}), grpc.MaxCallRecvMsgSize(1<<30))}
	if to.KeepaliveMS > 0 {
		options = append(options, grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: time.Duration(to.KeepaliveMS) * time.Millisecond, PermitWithoutStream: true}))
	}
	if to.Retries {
		options = append(options, grpc.WithDefaultServiceConfig(retries))
	}
	if to.CA == "" {
		options = append(options, grpc.WithInsecure())
	} else {
		config := &tls.Config{RootCAs: x509.NewCertPool()}
		config.RootCAs.AppendCertsFromPEM(must(os.ReadFile(to.CA)))
		if to.Certificate != "" {
			config.Certificates = []tls.Certificate{must(tls.LoadX509KeyPair(to.Certificate, to.Key))}
		}
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	}
	return must(grpc.Dial(to.Address, options...))
}

// The bytes that `fill` of a request stands for.
func pattern(size int) []byte {
	filled := make([]byte, size)
	x := uint32(1)
	for at := range filled {
		if at < block {
			x = x*1664525 + 1013904223
			filled[at] = byte(x >> 24)
		} else {
			filled[at] = filled[at-block]
		}
	}
	return filled
}

func makeCall(channel *grpc.ClientConn, call call) result {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel() // Go's way to leave a stream.
	if call.TimeoutMS != nil {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(*call.TimeoutMS)*time.Millisecond)
		defer cancel()
	}
	for _, pair := range call.Metadata {
		name, value := pair[0], pair[1]
		if strings.HasSuffix(name, "-bin") {
			value = string(must(base64.StdEncoding.DecodeString(value)))
		}
		ctx = metadata.AppendToOutgoingContext(ctx, name, value)
	}
	var trailers metadata.MD
	options := []grpc.CallOption{grpc.Trailer(&trailers)}
	if call.Compression != "" {
		options = append(options, grpc.UseCompressor(call.Compression))
	}
	var requests [][]byte
	for _, request := range call.Requests {
		requests = append(requests, append(request.Head, pattern(request.Fill)...))
	}
	responses := []response{}
	add := func(message []byte) {
		cut := len(message) - call.Tail
		responses = append(responses, response{message[:cut], crc32.ChecksumIEEE(message[cut:])})
	}
	err := func() error {
		if call.Kind == "unary" {
			var message []byte
			err := channel.Invoke(ctx, call.Method, requests[0], &message, options...)
			if err == nil {
				add(message)
			}
			return err
		}
		description := grpc.StreamDesc{ServerStreams: true, ClientStreams: call.Kind == "bidi"}
		stream, err := channel.NewStream(ctx, &description, call.Method, options...)
		if err != nil {
			return err
		}
		// The error of a send is io.EOF, whatever became of the call; RecvMsg returns its status.
		send := func() {
			if len(requests) == 0 {
				stream.CloseSend()
			} else {
				stream.SendMsg(requests[0])
				requests = requests[1:]
			}
		}
		if call.Turns {
			send()
		} else {
			for len(requests) > 0 {
				send()
			}
			send()
		}
		for {
			var message []byte
			if err := stream.RecvMsg(&message); err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
			add(message)
			if call.Turns {
				send()
			}
			switch len(responses) {
			case call.LeaveAfter:
				return nil
			case call.CancelAfter:
				cancel()
			}
		}
	}()
	made := result{Responses: responses, Trailers: map[string]string{}}
	for name, values := range trailers {
		made.Trailers[name] = values[0]
		if strings.HasSuffix(name, "-bin") {
			made.Trailers[name] = base64.StdEncoding.EncodeToString([]byte(values[0]))
		}
	}
	ended := status.Convert(err)
	made.Code, made.Message = code.Code(ended.Code()).String(), ended.Message()
	if err == nil && call.LeaveAfter > 0 {
		made.Code = "LEFT"
	}
	return made
}

// Makes a call, or makes it again and again: the result is that of the first that failed, or of the last.
func repeat(channel *grpc.ClientConn, call call) result {
	end := time.Now().Add(time.Duration(call.Repeat * float64(time.Second)))
	shown := makeCall(channel, call)
	codes := map[string]int{shown.Code: 1}
	for time.Now().Before(end) {
		last := makeCall(channel, call)
		codes[last.Code]++
		if shown.Code == "OK" {
			shown = last
		}
	}
	shown.Codes = codes
	return shown
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	var to connection
	if err := json.Unmarshal([]byte(os.Args[1]), &to); err != nil {
		log.Fatal(err)
	}
	channel := dial(to)
	defer channel.Close()
	calls, results := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var call call
		if err := calls.Decode(&call); err == io.EOF {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		if err := results.Encode(repeat(channel, call)); err != nil {
			log.Fatal(err)
		}
	}
}
