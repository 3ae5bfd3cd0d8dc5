// Follows one job from Go: subscribes, submits, and prints each change once, to the job's end.
//
//	go mod init follow && go get github.com/nats-io/nats.go && go run follow.go
//
// Each event carries the changes since the one before, numbered by rev; after a gap or a silence it asks show.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/nats-io/nats.go"
)

const tenant, job = "default", "from-go"

type change struct {
	Rev    int    `json:"rev"`
	State  string `json:"state"`
	Worker string `json:"worker"`
	Why    string `json:"why"`
	Code   *int   `json:"code"`
}

// What an event says, and what `show` answers under "data".
type history struct {
	State   string   `json:"state"`
	Changes []change `json:"changes"`
}

type answer struct {
	Kind    string  `json:"kind"` // "accepted", "answer" or "error"
	Code    string  `json:"code"`
	Message string  `json:"message"`
	Next    string  `json:"next"`
	Data    history `json:"data"`
	// seconds after which the same bytes may be sent again; 0: never
	RetryAfterS float64 `json:"retry_after_s"`
}

var over = map[string]bool{"SUCCEEDED": true, "FAILED": true, "TIMED_OUT": true,
	"CANCELLED": true, "EXPIRED": true, "REJECTED": true}

// pause returns the seconds that an answer names, and no less than half a second.
func pause(seconds float64) time.Duration {
	if named := time.Duration(seconds * float64(time.Second)); named > 500*time.Millisecond {
		return named
	}
	return 500 * time.Millisecond
}

// ask sends the same bytes again while no scheduler leads or can write: they name the job, so that is safe.
func ask(nc *nats.Conn, verb, body string) answer {
	for tries := 0; tries < 60; tries++ {
		msg, err := nc.Request("moorage.api."+tenant+"."+verb, []byte(body), 5*time.Second)
		if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, nats.ErrTimeout) {
			time.Sleep(500 * time.Millisecond)
			continue
		}
		if err != nil {
			log.Fatal(err)
		}
		var got answer
		if err := json.Unmarshal(msg.Data, &got); err != nil {
			log.Fatal(err)
		}
		if got.Code == "not-leading" || got.RetryAfterS > 0 { // "overloaded" and "queue-full" say when to come again
			time.Sleep(pause(got.RetryAfterS))
			continue
		}
		if got.Kind == "error" {
			log.Fatalf("%s; %s", got.Message, got.Next)
		}
		return got
	}
	log.Fatal("no scheduler answers")
	return answer{}
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

	events, err := nc.SubscribeSync("moorage.event." + tenant + "." + job)
	if err != nil {
		log.Fatal(err)
	}
	ask(nc, "submit", `{"job": "`+job+`", "gpu": {"count": 2, "model": "H100"}, "run": {"argv": ["sleep", "1"]}}`)

	seen := 0
	tell := func(told history) {
		for _, c := range told.Changes {
			if c.Rev > seen {
				seen = c.Rev
				fmt.Println(c.Rev, c.State, c.Worker, c.Why)
			}
		}
		if over[told.State] {
			os.Exit(0)
		}
	}
	tell(ask(nc, "show", `{"job": "`+job+`"}`).Data)
	for {
		msg, err := events.NextMsg(10 * time.Second)
		var told history
		if err == nil {
			err = json.Unmarshal(msg.Data, &told)
		}
		if err != nil || len(told.Changes) > 0 && told.Changes[0].Rev > seen+1 {
			told = ask(nc, "show", `{"job": "`+job+`"}`).Data
		}
		tell(told)
	}
}
