#!/bin/sh
# unshare --mount container.sh MODELS PATH... -- COMMAND...
#
# Runs the command as a container that is restricted would: as user 1000 without capabilities, with a file system that
# it can only read, but for /tmp and a /dev/shm of 64 MiB, which are empty, and MODELS at /mnt/models. It sees the
# PATHs even where /tmp or /root hide them.
set -eu
models=$1
shift
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/models
mount --bind "$models" /mnt/models
mount -o remount,bind,ro /mnt/models
paths=
count=0
while [ "$1" != -- ]; do
    mkdir -p "/mnt/.paths/$count"
    mount --bind "$1" "/mnt/.paths/$count"
    paths="$paths $1"
    count=$((count + 1))
    shift
done
shift
mount -o remount,bind,ro /
mount -t tmpfs -o mode=755 tmpfs /root
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777,size=64m tmpfs /dev/shm
count=0
for path in $paths; do
    mkdir -p "$path"
    mount --bind "/mnt/.paths/$count" "$path"
    mount -o remount,bind,ro "$path"
    umount "/mnt/.paths/$count"
    count=$((count + 1))
done
mount -o remount,ro /root
cd /
exec setpriv --reuid=1000 --regid=1000 --clear-groups --bounding-set=-all --no-new-privs -- "$@"
