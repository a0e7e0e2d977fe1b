"""Measures how fast kvferry moves the KV of one request between two processes of this host, over
TCP and through shared memory.

For each shape and fragmentation it runs kvferry, what it is compared with and the limits of the
machine in turn, over and over, and prints one row: medians, with the spread of kvferry's. Every
byte is verified after every run. README.md says what the columns mean and what makes the
comparison fair.
"""

import argparse
import contextlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import allocators
import device
from drivers import check_settings
from network import LOOPBACK, CannotMake, apart, check_apart, check_netns, netns_pair
from picture import import_matplotlib, write_picture
from row import PARTS, measure
from systems import ROOT
from table import Table, write_csv, write_json
from workload import FRAGMENTATIONS, SHAPES

TABLES_SECONDS = 1800  # Longest that a program that prints tables may take.


def git_commit():
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return "unknown"


def cpu_model():
    with contextlib.suppress(OSError):
        match = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def congestion_control():
    with contextlib.suppress(OSError):
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return "unknown"


def names_of(text, known, what):
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no {what} {', '.join(unknown)}; there are {', '.join(known)}"
        )
    return names


def add_what(parser):
    """What is moved, and how often."""
    parser.add_argument(
        "--shapes",
        type=lambda text: names_of(text, SHAPES, "shape"),
        default=list(SHAPES),
        help=f"comma-separated; default: {','.join(SHAPES)}",
    )
    parser.add_argument(
        "--frags",
        type=lambda text: names_of(text, FRAGMENTATIONS, "fragmentation"),
        default=FRAGMENTATIONS,
        help=f"comma-separated; default: {','.join(FRAGMENTATIONS)}",
    )
    parser.add_argument(
        "--paths",
        type=lambda text: names_of(text, PARTS, "path"),
        default=list(PARTS),
        help=f"comma-separated; default: {','.join(PARTS)}",
    )
    parser.add_argument("--reps", type=int, default=5, help="measured runs of each (default: 5)")
    parser.add_argument(
        "--rest-ms", type=int, default=20, help="pause before each run (default: 20)", metavar="MS"
    )
    parser.add_argument("--seed", type=int, default=1, help="which pages are chosen (default: 1)")


def add_network(parser):
    parser.add_argument(
        "--netns",
        action="store_true",
        help="TCP between two network namespaces, joined by a veth pair, instead of over loopback; "
        "needs root",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="TCP with each side on one half of the processors, as two hosts have their own; "
        "otherwise the system may put both sides on one",
    )


def add_ours(parser):
    parser.add_argument(
        "--build",
        type=Path,
        default=ROOT / "build/release",
        help="CMake build folder of what is measured (default: build/release)",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of kvferry's Config, on both sides; may be repeated",
    )
    parser.add_argument(
        "--push",
        action="store_true",
        help="also kvferry in the other order: the decode side registers its pages first",
    )
    parser.add_argument(
        "--ways",
        action="store_true",
        help="also each way that a transfer can take, forced: how good the choice is. Over "
        "TCP there is one to make with --config network_path=auto and a direct_tls of this machine",
    )
    parser.add_argument(
        "--also", type=Path, metavar="BUILD", help="another build, measured in turn with the first"
    )
    parser.add_argument(
        "--also-config",
        action="append",
        metavar="KEY=VALUE",
        help="settings of --also; default: those of --config",
    )


def add_peers(parser):
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="PYTHON",
        help="a Python that has requirements/peers.txt: measures NIXL and Mooncake as well",
    )
    parser.add_argument(
        "--nixl-tls", default="tcp,self", help="UCX_TLS of NIXL over TCP (default: tcp,self)"
    )
    parser.add_argument(
        "--nixl-host-tls", default="all", help="UCX_TLS of NIXL on the same host (default: all)"
    )
    parser.add_argument("--no-zmq", action="store_true", help="no plain ZeroMQ")
    parser.add_argument("--no-limits", action="store_true", help="no memcpy and no TCP streams")
    parser.add_argument("--no-pools", action="store_true", help="only what moves KV")


def add_outputs(parser):
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the tables there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run there")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="also draw the tables, as FILE.png and FILE.svg (requirements/picture.txt)",
    )


def check(args, parser):
    """Ends the program, before anything is measured, when it could not end well."""
    if args.reps < 1:
        parser.error("--reps must be at least 1")
    for build in filter(None, (args.build, args.also)):
        if not (build / "bench/kvferry_bench_transfer").exists():
            parser.error(f"{build} holds no bench/kvferry_bench_transfer; build it: ./dev build")
    for build, settings in ((args.build, args.config), (args.also, args.also_config)):
        if settings:
            binary = (build or args.build) / "bench/kvferry_bench_transfer"
            check_settings(binary, settings, parser)
    if args.peers and not os.access(args.peers, os.X_OK):
        parser.error(f"--peers: {args.peers} is no Python that can be started")
    for path in filter(None, (args.csv, args.json, args.picture)):
        if not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {path.parent} for {path.name}")
    for option, check_option in (("netns", check_netns), ("apart", check_apart)):
        if not getattr(args, option):
            continue
        if "tcp" not in args.paths:
            parser.error(f"--{option} is of the path tcp, which --paths leaves out")
        try:
            check_option()
        except CannotMake as error:
            parser.error(f"--{option}: {error}")
    if args.picture:
        try:
            import_matplotlib()
        except ImportError as error:
            parser.error(
                f"--picture needs matplotlib: {error} (requirements/picture.txt; ./dev bench "
                "installs it)"
            )


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for add in (add_what, add_network, add_ours, add_peers, add_outputs):
        add(parser)
    args = parser.parse_args()
    check(args, parser)
    if args.also_config is not None and args.also is None:
        args.also = args.build
    return args


def print_tables(name, command, reps, problems):
    """The tables that a program of ours prints by itself."""
    print(flush=True)
    try:
        subprocess.run([*command, f"--reps={reps}"], check=True, timeout=TABLES_SECONDS)
    except subprocess.CalledProcessError as error:
        problems.append(f"{name}: exit status {error.returncode}, see there")
    except (OSError, subprocess.TimeoutExpired) as error:
        problems.append(f"{name}: {error}")


def packages_of(python):
    """The folder of its site-packages."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def print_pools(args, problems):
    """Everything but what moves KV between processes; the allocators' rows."""
    rows = allocators.print_table(args.build, args.reps, problems)
    for driver in ("kernels", "buffers", "stores", "sessions"):
        command = [args.build / f"bench/kvferry_bench_{driver}"]
        print_tables(driver, command, args.reps, problems)
    if args.peers:
        command = [sys.executable, ROOT / "bench/mooncake_bench.py", "--peers"]
        print_tables("Mooncake", [*command, packages_of(args.peers)], args.reps, problems)
    print_gpu(args, problems)
    return rows


def print_gpu(args, problems):
    """Kernels on a GPU, and transfers of pools that lie there."""
    if not device.has_gpu():
        problems.append("pools on a GPU: nvidia-smi finds none")
        return
    folder = args.build / "bench"
    print_tables("kernels on a GPU", [folder / "kvferry_bench_cuda"], args.reps, problems)
    command = [sys.executable, ROOT / "bench/device.py", "--bin", folder]
    for option in ("csv", "json"):
        if path := getattr(args, option):
            command += [f"--{option}", path.with_name(f"device.{option}")]
    print_tables("pools on a GPU", command, args.reps, problems)


def describe(args):
    return {
        "commit": git_commit(),
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "congestion_control": congestion_control(),
        "load": os.getloadavg()[0],
        "reps": args.reps,
        "config": args.config,
    }


def print_header(header):
    print(
        f"kvferry {header['commit']}; {header['cpu']}; Linux {header['kernel']}, "
        f"TCP {header['congestion_control']}"
    )
    print(
        f"host memory, median of {header['reps']} runs, in turn; GB/s; "
        f"load when started: {header['load']:.1f}",
        flush=True,
    )


def shown(args):
    """The systems that have columns."""
    asked = {
        "kvferry": True,
        "also": args.also,
        "push": args.push,
        "ways": args.ways,
        "push, NIXL": args.push and args.peers,
        "NIXL": args.peers,
        "Mooncake": args.peers,
        "ZeroMQ": not args.no_zmq,
        "limits": not args.no_limits,
    }
    return {name for name, wanted in asked.items() if wanted}


def measure_all(args, network, problems, notes):
    rows = []
    for part in (PARTS[path] for path in args.paths):
        where = f" ({network.name})" if part.name == "tcp" else ""
        print(f"\n{part.title}{where}\n")
        table = Table(part, shown(args))
        for shape_name in args.shapes:
            for fragmentation in args.frags:
                row = measure(part, args, network, shape_name, fragmentation, problems, notes)
                rows.append(row)
                table.add(row)
    return rows


def write_files(args, header, rows, allocator_rows, problems):
    if args.csv:
        write_csv(args.csv, rows)
    if args.json:
        write_json(args.json, header, rows, allocator_rows, problems)
    if args.picture:
        title = (
            f"kvferry {header['commit']}; {header['cpu']}; median of {header['reps']} runs; "
            f"TCP over {header['network']}"
        )
        write_picture(args.picture, title, rows)


def main():
    args = parse_arguments()
    header = describe(args)
    problems, notes = [], set()
    if not args.peers:
        problems.append("NIXL, Mooncake: give --peers (./dev bench --peers does)")
    try:
        with netns_pair() if args.netns else contextlib.nullcontext(LOOPBACK) as network:
            network = apart(network) if args.apart else network
            header["network"] = network.name
            print_header(header)
            rows = measure_all(args, network, problems, notes)
    except CannotMake as error:
        sys.exit(f"run.py: --netns: {error}")
    header["versions"] = sorted(notes)
    print("\n" + "; ".join(header["versions"]))
    allocator_rows = [] if args.no_pools else print_pools(args, problems)
    for problem in problems:
        print(f"not measured: {problem}")
    write_files(args, header, rows, allocator_rows, problems)
    # Only what was asked for counts: a missing peer is said, not failed.
    return 0 if all(row.samples.get("kvferry") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
