// Calls a service once from Go, and prints the parts of its answer, mostly one.
//
//	go mod init call && go get github.com/nats-io/nats.go && go run call.go SERVICE DATA [PRIORITY]
//
// What did not start is sent again within the time; what may have run never is. A call that ends early is cancelled.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

const tenant = "default"

// problem is the body of an error: of a member that refused a call, or of the scheduler.
type problem struct {
	Code         string `json:"code"`
	Message      string `json:"message"`
	Started      bool   `json:"started"`
	RetryAfterMs int    `json:"retry_after_ms"`
}

// call gives each part of the answer to take. The context bounds it, and ends it early. The priority is 0 to 100, or ""
// for 50.
func call(ctx context.Context, nc *nats.Conn, service string, data []byte, priority string, take func([]byte)) error {
	for pause := 20 * time.Millisecond; ; pause *= 2 {
		refused, err := once(ctx, nc, service, data, priority, take)
		if refused == nil || err != nil {
			return err
		}
		wait := time.Duration(refused.RetryAfterMs) * time.Millisecond
		if pause > 250*time.Millisecond {
			pause = 250 * time.Millisecond
		}
		if wait < pause {
			wait = pause
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return fmt.Errorf("%s did not start in time: %s", service, refused.Message)
		}
	}
}

// once sends the call. It returns why it did not start, or the error that ended it.
func once(ctx context.Context, nc *nats.Conn, service string, data []byte, priority string, take func([]byte)) (*problem, error) {
	name, _, _ := strings.Cut(service, ".") // of text.embed, the service is text
	subject, reply := "moorage.call."+tenant+"."+name, nats.NewInbox()
	answers, err := nc.SubscribeSync(reply)
	if err != nil {
		return nil, err
	}
	defer answers.Unsubscribe()
	msg := nats.Msg{Subject: "moorage.call." + tenant + "." + service, Reply: reply, Data: data, Header: nats.Header{}}
	size := int(nc.MaxPayload() / 2)
	if len(data) > int(nc.MaxPayload())-16*1024 { // the headers of a message need some
		msg.Data = nil // it goes in parts, as the member asks for them
		msg.Header.Set("Moorage-Input", strconv.Itoa(len(data)))
	}
	if priority != "" {
		msg.Header.Set("Moorage-Priority", priority)
	}
	if ends, ok := ctx.Deadline(); ok {
		msg.Header.Set("Moorage-Wait-Ms", strconv.FormatInt(time.Until(ends).Milliseconds(), 10))
	}
	if err := nc.PublishMsg(&msg); err != nil {
		return nil, err
	}
	for parts, sent := 0, 0; ; {
		answer, err := answers.NextMsgWithContext(ctx)
		if errors.Is(err, nats.ErrNoResponders) { // the server's own 503
			return wake(ctx, nc, name)
		}
		if err != nil {
			nc.Publish(subject+".cancel", []byte(reply))
			return nil, fmt.Errorf("%s: no answer, the call may have run: %w", service, err)
		}
		code := answer.Header.Get("Nats-Service-Error-Code")
		switch {
		case code != "":
			var told problem
			json.Unmarshal(answer.Data, &told)
			if told.Started || (code != "503" && code != "504") { // another code, as 422, may be the service's own
				return nil, fmt.Errorf("%s failed with %s: %s", service, code, told.Message)
			}
			return &told, nil
		case answer.Header.Get("Moorage-Send") != "":
			upto, _ := strconv.Atoi(answer.Header.Get("Moorage-Send"))
			for ; sent < upto && sent*size < len(data); sent++ {
				part := nats.NewMsg(answer.Header.Get("Moorage-Send-To"))
				part.Header.Set("Moorage-Part", strconv.Itoa(sent+1))
				part.Data = data[sent*size:]
				if len(part.Data) > size {
					part.Data = part.Data[:size]
				}
				if err := nc.PublishMsg(part); err != nil {
					return nil, err
				}
			}
		case answer.Header.Get("Moorage-Part") != "":
			parts++
			take(answer.Data)
		case answer.Header.Get("Moorage-End") != "":
			if said := answer.Header.Get("Moorage-End"); said != strconv.Itoa(parts) {
				return nil, fmt.Errorf("%s: %d of %s parts arrived", service, parts, said)
			}
			return nil, nil
		default:
			take(answer.Data)
			return nil, nil
		}
	}
}

// wake asks for a member. If no job has the service, nobody will serve it.
func wake(ctx context.Context, nc *nats.Conn, service string) (*problem, error) {
	told := problem{Message: "nobody serves it"}
	body, _ := json.Marshal(map[string]string{"service": service})
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if msg, err := nc.RequestWithContext(ctx, "moorage.api."+tenant+".wake", body); err == nil {
		json.Unmarshal(msg.Data, &told)
	}
	if told.Code == "not-found" {
		return nil, errors.New(told.Message)
	}
	return &told, nil
}

func main() {
	url := os.Getenv("NATS_URL")
	if url == "" {
		url = nats.DefaultURL
	}
	nc, err := nats.Connect(url)
	if err != nil {
		log.Fatal(err)
	}
	defer nc.Close()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	data := []byte(os.Args[2])
	if os.Args[2] == "-" {
		if data, err = io.ReadAll(os.Stdin); err != nil {
			log.Fatal(err)
		}
	}
	priority := ""
	if len(os.Args) > 3 {
		priority = os.Args[3]
	}
	err = call(ctx, nc, os.Args[1], data, priority, func(part []byte) { fmt.Println(string(part)) })
	nc.Flush()
	if err != nil {
		log.Fatal(err)
	}
}
