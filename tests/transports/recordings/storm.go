// A storm by grpc-go's client: storm HOST:PORT deadlines|cancels|reconnects COUNT.
package main

import (
	"context"
	"log"
	"os"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
)

type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error)      { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error { *v.(*[]byte) = append([]byte{}, data...); return nil }
func (raw) Name() string                               { return "raw" }
func (raw) String() string                             { return "raw" }

func call(ctx context.Context, conn *grpc.ClientConn, name string) error {
	request, answer := []byte("an ordinary request"), []byte{}
	return conn.Invoke(ctx, "/t.T/"+name, &request, &answer)
}

func dial(target string) *grpc.ClientConn {
	conn, err := grpc.Dial(target, grpc.WithInsecure(), grpc.WithBlock(),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})))
	if err != nil {
		log.Fatal(err)
	}
	if err := call(context.Background(), conn, "Echo"); err != nil {
		log.Fatal(err)
	}
	return conn
}

func main() {
	target, how := os.Args[1], os.Args[2]
	count, _ := strconv.Atoi(os.Args[3])
	rounds := 1
	if how == "reconnects" {
		rounds = 2
	}
	for round := 0; round < rounds; round++ {
		conn := dial(target)
		ctx, cancel := context.WithCancel(context.Background())
		if how == "deadlines" {
			ctx, cancel = context.WithTimeout(context.Background(), time.Second)
		}
		var calls sync.WaitGroup
		for number := 0; number < count; number++ {
			calls.Add(1)
			go func() {
				defer calls.Done()
				call(ctx, conn, "Held")
			}()
		}
		if how == "cancels" {
			time.Sleep(500 * time.Millisecond)
			cancel()
		}
		if how == "reconnects" {
			time.Sleep(500 * time.Millisecond)
			conn.Close()
			cancel()
			continue
		}
		calls.Wait()
		cancel()
		if err := call(context.Background(), conn, "Echo"); err != nil {
			log.Fatal(err)
		}
		conn.Close()
	}
}
