"""The names the demo model is taught, best-known first within each group, as `owner: members`."""

# fmt: off

# `builtins` holds bare names; every other owner is a module or a class whose members are taught.
NAMES: dict[str, str] = {
    "builtins": (
        "print len range open input int str float list dict set tuple bool type sorted sum min max abs all any zip map "
        "filter enumerate reversed round isinstance issubclass hasattr getattr setattr delattr id hash help dir vars "
        "iter next repr ascii chr ord bin hex oct pow divmod eval exec compile callable format globals locals super "
        "property staticmethod classmethod slice object bytes bytearray memoryview frozenset complex breakpoint aiter "
        "anext __import__ Exception ValueError TypeError KeyError IndexError AttributeError NameError "
        "ZeroDivisionError FileNotFoundError StopIteration KeyboardInterrupt RuntimeError NotImplementedError "
        "ImportError ModuleNotFoundError OSError PermissionError OverflowError AssertionError RecursionError "
        "UnicodeDecodeError TimeoutError SyntaxError MemoryError"
    ),
    "str": (
        "split join strip replace format lower upper startswith endswith find count index title capitalize lstrip "
        "rstrip splitlines isdigit isalpha isalnum isnumeric isdecimal isspace islower isupper istitle isidentifier "
        "zfill center ljust rjust encode partition rpartition rsplit rfind rindex swapcase casefold translate "
        "maketrans removeprefix removesuffix expandtabs format_map isascii isprintable"
    ),
    "list": "append extend insert remove pop clear index count sort reverse copy",
    "dict": "get keys values items pop popitem update setdefault clear copy fromkeys",
    "set": (
        "add remove discard pop clear union intersection difference symmetric_difference update issubset issuperset "
        "isdisjoint copy"
    ),
    "tuple": "count index",
    "bytes": "decode hex fromhex",
    "int": "bit_length bit_count to_bytes from_bytes",
    "float": "is_integer as_integer_ratio",
    "os": (
        "listdir getcwd chdir mkdir makedirs remove rename rmdir walk getenv environ system scandir stat getpid "
        "unlink removedirs replace access chmod cpu_count urandom kill putenv getlogin link symlink readlink popen "
        "fsync get_terminal_size truncate utime"
    ),
    "os.path": (
        "join exists isfile isdir basename dirname abspath split splitext getsize expanduser realpath isabs normpath "
        "relpath commonpath getmtime islink expandvars commonprefix samefile ismount"
    ),
    "sys": "exit argv path version platform stdin stdout stderr getsizeof modules executable getrecursionlimit "
    "setrecursionlimit maxsize byteorder getrefcount exc_info intern getdefaultencoding",
    "json": "loads dumps load dump JSONDecoder JSONEncoder JSONDecodeError",
    "math": (
        "sqrt pi floor ceil sin cos tan log exp pow factorial gcd lcm fabs log2 log10 degrees radians hypot isclose "
        "isnan isinf isfinite fsum prod comb perm trunc atan atan2 asin acos dist fmod modf copysign isqrt cbrt exp2 "
        "expm1 log1p gamma erf sinh cosh tanh frexp ldexp remainder"
    ),
    "random": "random randint choice choices shuffle sample uniform seed randrange gauss getrandbits betavariate "
    "expovariate triangular getstate setstate Random",
    "re": "sub search match findall compile split fullmatch finditer escape subn purge",
    "itertools": (
        "chain product permutations combinations count cycle repeat islice groupby zip_longest accumulate takewhile "
        "dropwhile starmap tee compress filterfalse pairwise combinations_with_replacement"
    ),
    "functools": "lru_cache partial reduce wraps cache cached_property total_ordering singledispatch cmp_to_key "
    "update_wrapper partialmethod",
    "collections": "Counter defaultdict deque namedtuple OrderedDict ChainMap UserDict UserList",
    "collections.Counter": "most_common elements subtract update",
    "collections.deque": "append appendleft pop popleft rotate extendleft",
    "datetime": "datetime timedelta date time timezone tzinfo",
    "datetime.datetime": "now today strptime strftime fromtimestamp utcnow isoformat timestamp fromisoformat combine "
    "replace",
    "datetime.date": "today fromisoformat weekday isoweekday",
    "datetime.timedelta": "total_seconds",
    "time": "sleep time perf_counter strftime localtime monotonic gmtime strptime ctime process_time mktime asctime "
    "time_ns",
    "pathlib": "Path PurePath",
    "pathlib.Path": (
        "exists read_text write_text mkdir glob is_file is_dir iterdir open rglob unlink rename cwd home resolve "
        "read_bytes write_bytes stat touch joinpath with_suffix absolute rmdir relative_to expanduser"
    ),
    "shutil": "copy copyfile copytree rmtree move copy2 which make_archive unpack_archive disk_usage copyfileobj "
    "get_terminal_size",
    "subprocess": "run Popen call check_output check_call CompletedProcess getoutput CalledProcessError",
    "csv": "reader writer DictReader DictWriter",
    "argparse": "ArgumentParser Namespace",
    "argparse.ArgumentParser": "add_argument parse_args",
    "logging": "getLogger basicConfig info debug warning error critical exception Logger Formatter",
    "threading": "Thread Lock Event current_thread Timer active_count RLock Semaphore Condition Barrier",
    "asyncio": "run gather sleep create_task wait_for Queue Task Event to_thread get_running_loop",
    "string": "Template capwords Formatter",
    "copy": "copy deepcopy",
    "glob": "glob iglob escape",
    "tempfile": "TemporaryDirectory NamedTemporaryFile mkdtemp mkstemp gettempdir TemporaryFile",
    "pickle": "dump dumps load loads",
    "hashlib": "md5 sha256 sha1 new",
    "base64": "b64encode b64decode urlsafe_b64encode b32encode",
    "urllib.request": "urlopen urlretrieve Request",
    "urllib.parse": "urlparse quote unquote urlencode urljoin parse_qs urlsplit",
    "operator": "itemgetter attrgetter methodcaller add mul",
    "contextlib": "contextmanager suppress closing redirect_stdout ExitStack nullcontext",
    "dataclasses": "dataclass field asdict astuple replace",
    "enum": "Enum IntEnum auto Flag",
    "heapq": "heappush heappop heapify nlargest nsmallest merge heapreplace heappushpop",
    "bisect": "bisect insort bisect_left bisect_right",
    "statistics": "mean median mode stdev variance pstdev quantiles fmean harmonic_mean geometric_mean",
    "decimal": "Decimal getcontext",
    "fractions": "Fraction",
    "uuid": "uuid4 uuid1 UUID",
    "inspect": "signature getsource getdoc isfunction isclass getmembers",
    "textwrap": "dedent wrap fill indent shorten",
    "traceback": "print_exc format_exc",
    "io": "StringIO BytesIO TextIOWrapper",
    "zipfile": "ZipFile is_zipfile",
    "gzip": "open compress decompress",
    "sqlite3": "connect",
    "socket": "socket gethostname create_connection",
    "struct": "pack unpack calcsize",
    "secrets": "token_hex choice token_urlsafe randbelow token_bytes",
    "pprint": "pprint pformat",
    "platform": "system python_version machine",
    "getpass": "getpass getuser",
    "multiprocessing": "Process Pool Queue cpu_count",
    "concurrent.futures": "ThreadPoolExecutor ProcessPoolExecutor as_completed wait",
    "queue": "Queue PriorityQueue LifoQueue",
    "typing": "NamedTuple TypedDict Protocol cast overload",
    "abc": "ABC abstractmethod",
    "warnings": "warn filterwarnings",
    "timeit": "timeit repeat",
    "calendar": "monthrange isleap month_name",
    "locale": "setlocale",
    "importlib": "import_module reload",
    "fnmatch": "fnmatch filter",
    "difflib": "get_close_matches unified_diff SequenceMatcher",
    "html": "escape unescape",
    "unittest": "TestCase main",
    "weakref": "ref WeakValueDictionary",
    "ast": "parse literal_eval dump",
    "dis": "dis",
    "gc": "collect",
    "signal": "signal alarm",
    "atexit": "register",
    "shlex": "split quote join",
    "webbrowser": "open",
    "zlib": "compress decompress crc32",
    "array": "array",
    "cmath": "sqrt phase",
    "unicodedata": "name normalize category",
    "binascii": "hexlify unhexlify",
    "configparser": "ConfigParser",
    "tarfile": "open TarFile is_tarfile",
    "types": "SimpleNamespace",
    "hmac": "new compare_digest",
    "mimetypes": "guess_type",
    "filecmp": "cmp",
    "keyword": "iskeyword",
    "linecache": "getline",
    "fileinput": "input",
    "selectors": "DefaultSelector",
    "ipaddress": "ip_address ip_network",
    "colorsys": "rgb_to_hsv",
    "graphlib": "TopologicalSorter",
    "tomllib": "load loads",
    "sched": "scheduler",
    "cProfile": "run",
    "pdb": "set_trace",
    "codecs": "open encode",
    "errno": "errorcode",
    "zoneinfo": "ZoneInfo",
}

# Modules taught as such ("What is the json module?").
MODULES = (
    "os sys json math random re itertools functools collections datetime time pathlib shutil subprocess csv argparse "
    "logging threading asyncio string copy glob tempfile pickle hashlib base64 operator contextlib dataclasses enum "
    "heapq bisect statistics decimal fractions uuid inspect textwrap traceback io zipfile gzip sqlite3 socket struct "
    "secrets pprint platform getpass multiprocessing queue typing abc warnings timeit calendar locale importlib "
    "fnmatch difflib html unittest weakref ast dis gc signal atexit shlex webbrowser zlib array cmath unicodedata "
    "binascii configparser tarfile types hmac mimetypes filecmp keyword tomllib zoneinfo graphlib ipaddress os.path "
    "urllib.request urllib.parse concurrent.futures"
)
