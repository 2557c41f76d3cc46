#!/bin/sh
# First process of the guest: loads the modules, makes an RDMA device out of a network device, runs /share/run.sh and
# leaves its exit code in /share/exit. The kernel hands `netdev`, `address`, `loss` and `limit` over from its command line.
export PATH=/bin HOME=/tmp
mkdir -p /proc /sys /dev /tmp /run /var /share
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
ln -s /proc/self/fd /dev/fd

# From here on the kernel speaks up only when it dies.
dmesg -n 1

fail() {
    echo "guest: $*"
    sync
    poweroff -f
}

# Waits up to five seconds until the command given succeeds.
until_true() {
    local tries=500
    until "$@" 2>/dev/null; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || return 1
        usleep 10000
    done
}

while read -r module options; do
    insmod "/modules/$module" $options || fail "module $module does not load"
done </modules/order

mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 share /share || fail "the share does not mount"
# Whoever started this guest may be gone.
(sleep "$limit"; echo "guest: still running after $limit s"; poweroff -f) &

ip link set lo up
[ "$netdev" != dum0 ] || ip link add dum0 type dummy || fail "no dummy network device"
ip address add "$address/24" dev "$netdev" || fail "$netdev gets no address"
ip link set "$netdev" up
# By its path: this shell takes its own tc, which is another, before any in PATH.
[ -z "$loss" ] || /bin/tc qdisc add dev "$netdev" root netem loss "$loss" || fail "no packet loss on $netdev"
rdma link add rxe0 type rxe netdev "$netdev" || fail "no RDMA device on $netdev"

gid=$(printf '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x' $(echo "$address" | tr . ' '))
until_true grep -qrs "$gid" /sys/class/infiniband/rxe0/ports/1/gids || fail "rxe0 does not get the address $gid"
until_true test -c /dev/infiniband/uverbs0 || fail "rxe0 cannot be opened"

# Test programs know the programs they start by where the host has built them.
if [ -d /share/bin ]; then
    cp /share/bin/* /bin/
    while read -r name path; do
        mkdir -p "${path%/*}"
        ln -s "/bin/$name" "$path"
    done </share/places
fi

ulimit -l unlimited
ulimit -n 65536
cd /tmp
# Through a pipe: programs draw no progress where nobody watches.
mkfifo /tmp/output
cat /tmp/output &
shown=$!
sh /share/run.sh >/tmp/output 2>&1
code=$?
# Until all is shown, but not for ever: a process that was left behind may keep the pipe open.
(sleep 5; kill "$shown") 2>/dev/null &
wait "$shown"
echo "$code" >/share/exit
sync
poweroff -f
