#!/bin/sh
# The first process of a VM of moorage. It runs one job and reports its end; then the runner on the host ends the VM.
# The initramfs must have sh, mount, mkdir, cat, sleep, dd, rm, env, setsid and tar, as in busybox; for disk
# images umount and chroot, too. If the kernel has the drivers of virtio as modules, the script /etc/moorage/boot of the
# initramfs must load them.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mkdir -p /proc /sys /dev /run /tmp /work
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
if [ -e /etc/moorage/boot ]; then sh /etc/moorage/boot; fi

# port NAME: waits for the port with this name and prints its file.
port() {
  while :; do
    for each in /sys/class/virtio-ports/*; do
      if [ "$(cat "$each/name" 2>/dev/null)" = "moorage.$1" ] && [ -e "/dev/${each##*/}" ]; then
        echo "/dev/${each##*/}"
        return
      fi
    done
    sleep 0.1
  done
}

exec 3<>"$(port job)" 4>"$(port out)" 5>"$(port err)" 6>"$(port work)"

# The job's disk image, if it has one, becomes the root of its command: its first file system that has a shell.
inside=
case "$(cat /proc/cmdline)" in *moorage.disk*)
  mkdir -p /disk
  until [ -e /dev/vda ]; do sleep 0.1; done
  for each in /dev/vda /dev/vda[0-9]*; do
    mount "$each" /disk 2>/dev/null || continue
    [ -x /disk/bin/sh ] && inside="chroot /disk" && break
    umount /disk
  done
  if [ -z "$inside" ]; then
    echo "no file system of the disk image has a shell" >&3
    while :; do sleep 60; done
  fi
  for each in proc sys dev run tmp work; do
    mkdir -p "/disk/$each" && mount -o bind "/$each" "/disk/$each"
  done
esac
echo up >&3
until read -r size mark keep <&3; do sleep 0.1; done
dd bs="$size" count=1 iflag=fullblock <&3 >/run/job 2>/dev/null

# shellcheck disable=SC2086
setsid $inside sh /run/job </dev/null >&4 2>&5 3>&- 4>&- 5>&- 6>&- &
job=$!
while read -r name <&3; do
  [ "$name" != TERM ] || : >/run/asked
  kill -s "$name" -- "-$job" || kill -s "$name" "$job"
done 2>/dev/null 4>&- 5>&- 6>&- &
wait "$job"
code=$?
# What a main process that was asked to end has left keeps the rest of the grace: the host ends the guest after it.
while [ -e /run/asked ] && kill -0 -- "-$job" 2>/dev/null; do sleep 0.1; done

# The host cannot see the end of a port, so each stream ends with a mark that the host chose.
if [ "$keep" = yes ]; then tar -cf - -C /work . >&6; fi
for stream in 4 5 6; do printf '\004%s' "$mark" >&"$stream"; done
echo "exit $code" >&3
while :; do sleep 60; done
