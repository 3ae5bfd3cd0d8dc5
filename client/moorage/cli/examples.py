"""Examples, as each verb's help shows them; tests read each one as the command would."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "run": (
        "moorage run --gpu 1xH100 -- nvidia-smi -L",
        "moorage run --gpu 2xH100:80G --time-limit 1h -- python3 -c 'print(6 * 7)'",
        "moorage run -it --gpu 1xH100 -- python3",
        "moorage run --gpu 3x2xA100 --gang -- sh -c 'echo $RANK of $WORLD_SIZE'",
    ),
    "serve": (
        "moorage serve embedder:embed --name embed",
        "moorage submit --service e:8 --with e.py -- moorage serve e:embed",
        "moorage serve --name resize -- node resize.js",
    ),
    "logs": (
        "moorage logs train-42",
        "moorage logs last",
        "moorage logs --label sweep=lr",
        "moorage logs --service embed",
    ),
    "use": ("moorage use train-42", "moorage use last --watch"),
    "exec": (
        "moorage exec train-42 -- nvidia-smi",
        "moorage exec train-42/3 -- cat out/loss.csv",
        "tar -c src | moorage exec last -- tar -x",
    ),
    "forward": ("moorage forward notebook 8888", "moorage forward notebook 8080:PORT"),
    "attach": ("moorage attach train-42",),
    "shell": ("moorage shell train-42", "moorage shell train-42/3"),
    "get": (
        "moorage get train-42",
        "moorage get last out/model.pt --out model",
        "moorage get last --list",
        "moorage get sweep out/loss.json --table results.csv",
    ),
    "wait": (
        "moorage wait train-42",
        "moorage wait all --at-most 2h",
        "moorage wait --label sweep=lr",
        "moorage submit --gpu -- sleep 5 && moorage wait last",
    ),
    "events": (
        "moorage events train-42",
        "moorage events --json | jq -r .job",
        "moorage events --fleet --since 12h",
    ),
    "submit": (
        "moorage submit --gpu 2xH100:80G -- sleep 60",
        "moorage submit --gpu 8xA100 --replicas 4 --gang --job train-42 -- sleep 60",
        "moorage submit --gpu --at 'tomorrow 03:00' -- python3 train.py",
        "moorage submit --gpu --after train-42 --after prep:any -- python3 eval.py",
        "moorage submit --array 0-99%4 -- sh -c 'echo replica $MOORAGE_INDEX'",
        "moorage submit --each lr.csv --with train.py -- python3 train.py --lr {lr}",
        "moorage submit -f sweep.yaml --dry-run",
        "moorage submit -f request.json",
        'echo \'{"gpu": {}, "run": {"argv": ["nvidia-smi"]}}\' | moorage submit -f -',
    ),
    "sbatch": (
        "moorage sbatch job.sh",
        "moorage sbatch job.sh --submit",
        "moorage sbatch job.sh --also='--time=2:00:00' --submit -- --lr 0.1",
        "moorage sbatch job.sh --shared --submit",
    ),
    "show": (
        "moorage show train-42",
        "moorage show last",
        "moorage show train-42 --watch --json",
    ),
    "ls": (
        "moorage ls --running --since 1h",
        "moorage ls --state RUNNING --state QUEUED",
        "moorage ls 'train-*' --label sweep=lr",
        "moorage ls --tenant all --worker n07",
        "moorage ls --watch",
        "moorage ls --format '{job} {state}'",
        "moorage ls --json | jq -r .data.jobs[].job",
    ),
    "cancel": (
        "moorage cancel train-42 --reason superseded",
        "moorage cancel last",
        "moorage cancel train-42,train-43",
        "moorage cancel --label sweep=lr --state queued",
        "moorage cancel --before train-44",
    ),
    "lease": (
        "moorage lease 1xT4 -- node app.js",
        "moorage lease 2xH100 --within 10m -- python train.py",
        "moorage lease 1 --purpose debugging -- bash",
    ),
    "check worker": (
        "moorage check worker plain",
        "moorage check worker n1 --short 'my-exit 7' --long 'my-sleep 3600'",
    ),
    "call": (
        "moorage call embed hello",
        "moorage call classify @cat.jpg",
        """moorage call generate '{"prompt": "Hello"}' --as json""",
        "jq -c .query today.json | moorage call search - --as json --within 2m",
    ),
    "change": (
        "moorage change sweep --max-running 16 --priority 60 --time-limit 2h",
        "moorage change sweep --hold --reason 'the data is wrong'",
        "moorage change train-42 --time-limit +2h",
    ),
    "uncancel": ("moorage uncancel train-44",),
    "signal": ("moorage signal train-42 USR1", "moorage signal train-42/3 USR2"),
    "follow": (
        "moorage follow --label sweep=lr",
        "moorage follow --state FAILED --exec ./tell.sh --state-file told.json",
        "moorage follow 'train-*' --state RUNNING --post http://localhost:8080/",
    ),
    "again": (
        "moorage again train-42 --failed",
        "moorage again train-42 --failed --time-limit 4h --env LR=0.01",
        "moorage again --label sweep=lr --state failed --failed",
    ),
    "explain": (
        "moorage explain train-42",
        "moorage explain train-42 --watch",
        "moorage explain no-match",
    ),
    "plan": (
        "moorage plan --gpu 8xH100 -- sleep 60",
        "moorage plan --gpu 8xA100 --add 2x8xA100 -- sleep 60",
        "moorage plan --drain n07 --quota acme=16 --quota vision=32 --share acme=3:8",
    ),
    "replay": (
        "moorage replay --job vision/train-42",
        "moorage replay --at 48213 --json",
        "moorage replay --backup moorage-0f3a-48213.backup --job vision/train-42",
        "moorage replay leader.rec",
        "moorage replay leader.rec --job vision/train-42 --json",
    ),
    "simulate": (
        "moorage simulate jobs.jsonl --fleet 4x8xH100",
        "moorage simulate philly.csv --cluster 6c71a0 --fleet 24x8xT4 --plot it.svg",
        "moorage simulate jobs.csv --fleet 8x8xA100 --ranker pack,headroom --json",
        "moorage simulate week.jsonl --add 2x8xH100 --shake 5",
    ),
    "services": ("moorage services", "moorage services embed --slow", "moorage services --json | jq .data.services"),
    "rollback": ("moorage rollback embed", "moorage rollback embed --job embedder-5"),
    "fleet": (
        "moorage fleet",
        "moorage fleet n07",
        "moorage fleet --watch",
        "moorage fleet --json | jq '.data.fits_now'",
    ),
    "mcp": ("moorage mcp --tenant vision", "moorage mcp --tenant vision --operate"),
    "page": (
        "moorage page",
        "moorage page --nats observer.wall --listen 0.0.0.0:9480",
        "moorage page --nats operator.ana --output-of vision=submitter.vision --operate",
        "moorage page --nats operator.ana --public-url https://fleet.example.com",
    ),
    "door": (
        "moorage door",
        "moorage door --keys door_keys --tls-cert door.pem --tls-key door.key",
        "moorage door --keys door_keys --origin https://app.example.com",
    ),
    "door key": (
        "moorage door key add laptop --services 'chat,embed*' --rate 600/m",
        "moorage door key ls",
        "moorage door key rm laptop",
    ),
    "page logout": ("moorage page logout --all --secret-file page.key",),
    "top": (
        "moorage top",
        "moorage top --once",
        "moorage top --filter vision",
        "moorage top --once --at 14:03",
        "moorage top --json | jq .troubles",
    ),
    "drain": (
        "moorage drain n07",
        "moorage drain n07 n08 --within 30m --why 'new disk'",
        "moorage drain n07 --from 22:00 --for 2h",
        "moorage drain --idle 10m --pool spot --keep 1",
    ),
    "cordon": ("moorage cordon n07 --why 'a fan is loud'", "moorage cordon n07 --gpu 3"),
    "uncordon": ("moorage uncordon n07 n08", "moorage uncordon n07 --gpu 3"),
    "audit": (
        "moorage audit",
        "moorage audit --quick --json",
        "moorage audit --watch",
    ),
    "metrics": (
        "moorage metrics",
        "moorage metrics --listen 9470",
        "moorage metrics --listen 0.0.0.0:9470 --nats operator.ana",
    ),
    "admin hold": (
        "moorage admin hold train-42 --why 'bad data'",
        "moorage admin hold --queue --tenant vision --why 'month end'",
        "moorage admin hold train-42 && moorage admin requeue train-42",
    ),
    "admin release": (
        "moorage admin release train-42",
        "moorage admin release --queue --tenant vision",
        "moorage admin release --worker n07 --why 'nvidia-smi shows it clean'",
    ),
    "admin mig": (
        "moorage admin mig gpu-1 0 3g.40gb,4x1g.10gb",
        "moorage admin mig gpu-1 0 off --at-most 30m",
    ),
    "admin requeue": (
        "moorage admin requeue train-42 --why 'wrong host'",
        "moorage admin requeue train-42,train-43",
    ),
    "admin place": ("moorage admin place check-n07 --on n07",),
    "admin resize": (
        "moorage admin resize eval-7 --compute 40% --memory 8G",
        "moorage admin resize eval-7 --compute 100%",
    ),
    "admin freeze": (
        "moorage admin freeze train-42 --why 'room for an hour'",
        "moorage admin freeze train-42,train-43",
    ),
    "admin resume": ("moorage admin resume train-42",),
    "admin time-limit": ("moorage admin time-limit train-42 --to +2h --why 'the demo is at noon'",),
    "admin priority": (
        "moorage admin priority train-42 --to 90",
        "moorage admin priority all --to 10 --tenant sandbox",
    ),
    "admin counter": (
        "moorage admin counter matlab 20",
        "moorage admin counter heavy 2 --per-tenant",
        "moorage admin counter",
    ),
    "admin limit": (
        "moorage admin limit --tenant vision --gpus 16",
        "moorage admin limit --tenant sandbox --gpus 4 --jobs 500 --why 'until Monday'",
        "moorage admin limit --tenant vision --cores 512 --running 200 --time-limit 2d",
        "moorage admin limit --tenant vision --gpus-of H100=32",
        "moorage admin limit --tenant lab --gpu-hours 5000/month --gpu-weights L4=0.2",
        "moorage admin limit --tenant vision --gpus none --jobs none",
    ),
    "admin feature-level": (
        "moorage admin feature-level",
        "moorage admin feature-level --to 2 --schedulers 3 --why 'all are 0.3'",
    ),
    "admin trace": (
        "moorage admin trace week.jsonl --since 7d",
        "moorage admin trace --keep 1GiB",
        "moorage admin trace - --anonymous",
    ),
    "admin backup": (
        "moorage admin backup /var/backups",
        "moorage admin backup ledger.backup --settings prod.toml --json",
    ),
    "admin restore": (
        "moorage admin restore ledger.backup",
        "moorage admin restore ledger.backup --replace",
    ),
    "admin share": (
        "moorage admin share --tenant vision --weight 3",
        "moorage admin share --tenant vision --gpus 16 --why 'their own hosts'",
        "moorage admin share --tenant vision --weight 0 --gpus 0",
    ),
    "admin forget": ("moorage admin forget spot-3 spot-4 --why 'their rack is sold'",),
    "admin token": (
        "moorage admin token site pool=spot --gpus 8 --uses 50 --until 24h > spot.token",
        "moorage admin token site --revoke UAT6QVZX",
    ),
    "admin joiner": ("moorage admin joiner site",),
    "admin demand": (
        "moorage admin demand",
        "moorage admin demand --json | jq .gpus",
    ),
    "admin tenants": (
        "moorage admin tenants",
        "moorage admin tenants --format '{tenant} {gpus}'",
    ),
    "admin acts": (
        "moorage admin acts --since 7d",
        "moorage admin acts --by ana --verb drain",
    ),
    "admin keys": ("moorage admin keys site", "moorage admin keys site --cut", "moorage admin keys site --json"),
    "admin nats-config": (
        "moorage admin nats-config --out site --tenant vision --worker n01",
        "moorage admin nats-config --out site --tenant vision --auth mtls",
    ),
    "admin renew": ("moorage admin renew site", "moorage admin renew site --all"),
    "usage": (
        "moorage usage --since 30d",
        "moorage usage --by day,person --since 30d",
        "moorage usage --all --by tenant,hour --since 2d --csv",
        "moorage usage --waits --all --try week.jsonl",
    ),
    "policy test": (
        "moorage policy test rules.toml --trace week.jsonl",
        "moorage policy test rules.toml --trace t.jsonl --set reserve_after=60",
    ),
    "advise": ("moorage advise", "moorage advise --all --try week.jsonl"),
    "schedule add": (
        "moorage schedule add nightly --cron '0 3 * * *' --gpu 1 -- /srv/eval",
        "moorage schedule add mondays --cron '0 9 * * MON' --tz Asia/Tokyo -- /srv/x",
        "moorage schedule add tidy --cron '@every 10m' --overlap queue -- /srv/tidy",
    ),
    "schedule ls": ("moorage schedule ls", "moorage schedule ls --format '{name} {next_ms}'"),
    "schedule show": ("moorage schedule show nightly", "moorage schedule show nightly --json | jq .request"),
    "schedule pause": ("moorage schedule pause nightly",),
    "schedule resume": ("moorage schedule resume nightly",),
    "schedule run-now": ("moorage schedule run-now nightly", "moorage logs $(moorage schedule run-now nightly)"),
    "schedule remove": ("moorage schedule remove nightly",),
    "dlq list": (
        "moorage dlq list",
        "moorage dlq list --tenant vision --format '{sequence} {code}'",
    ),
    "dlq show": ("moorage dlq show 12",),
    "dlq resend": (
        "moorage dlq resend 12",
        "moorage dlq resend 12 -f mended.json",
        "moorage dlq resend all --tenant vision --why 'quota was raised'",
    ),
    "dlq drop": (
        "moorage dlq drop 12,13",
        "moorage dlq drop all --tenant sandbox",
    ),
    "scheduler": ("MOORAGE_LEDGER_URL_FILE=/etc/moorage/ledger-url moorage scheduler --nats prod",),
    "worker": (
        "moorage worker --label zone=a",
        "moorage worker --simulate 4x8xH100",
    ),
    "doctor": (
        "moorage doctor",
        "moorage doctor --nats prod --json",
    ),
    "errors": (
        "moorage errors",
        "moorage errors queue-full",
    ),
    "add-path": (
        "TF_PREPEND_PATH=/opt/tools/bin moorage add-path -- python train.py",
        "TF_LD_LIBRARY_PATH=/opt/cuda/lib64 moorage add-path -- ./bench",
    ),
    "api": (
        "moorage api ls",
        """moorage api submit '{"job": "j", "gpu": {}, "run": {"argv": ["true"]}}'""",
        "moorage api admin.fleet | jq .data.fits_now",
    ),
    "schema": (
        "moorage schema request",
        "moorage schema event --json",
    ),
    "completion": (
        'eval "$(moorage completion bash)"',
        "moorage completion fish > ~/.config/fish/completions/moorage.fish",
    ),
    "help": (
        "moorage help run",
        "moorage help exit-codes",
    ),
    "demo": (
        "moorage demo",
        "moorage demo --jobs 100 --seed 7 --json",
    ),
    "up": (
        "moorage up --restore ledger.backup",
        "moorage up --simulate 4x8xH100",
        "moorage up --data /var/lib/moorage --port 4333",
    ),
}
