"""Every number of the tuner, each with its reason; the worker's contract has the shared ones. No
decision in the package rests on a bare constant elsewhere.
"""

from typing import Final

from sluice_core.contract import AT_CAP_SHARE

# Breach: betting CUSUM on tick fractions.
BETS: Final = (2.0, 5.0, 10.0, 20.0, 50.0)
"""Stakes for an allowed share of 0.01, from slow leaks (2) to everything over (50). Scaled by
0.01/m, the largest loses half its capital on a clean tick and can never go below zero."""
BREACH_EVIDENCE: Final = 43_200.0
"""Average run length in ticks of 2 s for one target: one false breach a day at share = m."""
EVIDENCE_KEPT: Final = 2.0
"""Evidence is clipped at this multiple of the threshold: after an hour of overload a breach must
not need another hour to be forgotten. With everything over, two clean ticks forget it."""

# Headroom: Wald's SPRT of m/4 against m.
HEADROOM_SHARE: Final = 0.25
"""Headroom means a share over target of at most a quarter of what is allowed."""
HEADROOM_ALPHA: Final = 0.2
"""Chance to call a share of m headroom: cheap, as a wrong raise is undone by a breach. About 214
independent clean samples for P99."""
MIN_BATCHES: Final = 30
"""Fewer batch means than this give no usable variance; then a whole batch counts as one sample."""
DESIGN_QUANTILE: Final = 0.9
"""The design effect is taken at the window's own P90: common enough to be estimated, and it shares
its interference with the P99."""
MAX_INTERFERENCE_CORRELATION: Final = 0.95
"""Bound of the lag-one correlation of slow steps, so that the design effect stays finite."""
VERIFIABLE_S: Final = 3600.0
"""Evidence that takes more than an hour of traffic to collect cannot verify a target."""

# Selecting ticks.
BUSY_ALIKE: Final = 0.5
"""Pods with at least this part of another's batch should miss their gaps as it does. If they do
not, its node is the reason."""
SLOW_NODE: Final = 1.3
"""... and if they run less: steps this many times as long as theirs would be are the node's doing.
The worker uses the same factor for interference; a fit is good to a tenth."""
STALE_TICKS: Final = 5
"""A pod whose newest tick is this many ticks old is silent: one missed read is 1-2 ticks."""
RECENT_TICKS: Final = 15
"""Half a minute: the span over which causes, use of the cap and lengths are read."""
RUN_TICKS: Final = 32
"""Ticks in a run, whose sums are computed once."""
RUNS_FROM_WHOLE: Final = 8
"""With so many whole runs (8 minutes) bets begin with one: earlier ticks no longer matter."""
USED_SHARE: Final = AT_CAP_SHARE
"""A cap is used if running reached this share of it."""

# Failed requests.
FAILED_SHARE: Final = 0.01
"""Share of the requests that may fail before `RequestsSucceed` says so, or what the percentile lets
be late, if that is less: more failures alone break a P99. Looser percentiles are about speed; an
answer that never comes is not a slow one."""
ALL_FAILED_TICKS: Final = 30
"""A minute without one that finished: the engine serves nothing. One that serves one request in
twenty, of two a second, has such a minute about once an hour."""
ALL_FAILED: Final = 10
"""... and so many failed in it. Fewer may be an odd request and its client's retries: openai's
client sends two."""
MAX_KINDS: Final = 8
"""Kinds of failures that a sentence tells."""

# Model.
MIN_MODEL_RECORDS: Final = 30
"""A step model with fewer records proposes nothing; four coefficients need several times as
many."""
THROTTLED_ADDITIVE: Final = 0.05
"""Throttled share of the busy time above which the residual is a stall of a fixed length. It is the
rest of a CFS period, at most 100 ms. A larger batch does not stretch it, so it is added, not
multiplied."""
THROTTLED_INFEASIBLE: Final = 0.3
"""Throttled share of the busy time from which the CPU quota is why not even the smallest cap holds.
A pod held at half a core spends half of its busy time throttled."""
DEFAULT_OUTPUT_TOKENS: Final = 128.0
"""Mean output length before anything has finished: a short chat answer."""
DEFAULT_PROMPT_TOKENS: Final = 128.0
"""Mean uncached prompt before any was computed."""
CALIBRATION: Final = (0.1, 1.2)
"""Bounds of measured over predicted throughput of a saturated pod. Below 1: tokenising, HTTP and
the client cost time outside steps. A CPU quota also slows a full pod that ran free during the fit
(a fifth was seen). Above 1: the fit is off, and trusting it less is safe."""
MIN_FULL_TICKS: Final = 3
"""Ticks of a full pod before its throughput corrects the model."""
FULL_TICKS: Final = 30
"""Newest full ticks from which the correction is read: a minute."""
MIN_BEYOND: Final = 10
"""Measured gaps beyond the asked quantile before it corrects the model's: 1,000 in all for P99."""
MIN_CORRECTION: Final = 0.25
"""Lower bound of the correction: a smaller one means that the fit is from another regime."""

# Cap.
MAX_RAISE: Final = 2.0
"""Without a sure step model one raise at most doubles: each tells more of the next. In simulation
x2 reached 89-98 % of the best, single steps 9-56 %."""
SURE_PART: Final = 0.5
"""With one it goes to half of where the model points at once, and doubles from there. All the
way, a model fitted on few sequences went too far: 78 % of the best in bursts on a worker that slows
down, and 91 % on one that does not, where doubling has 84 and 95 %."""
SURE_STEPS: Final = 32
"""Steps of a pod from which its model is of its traffic, not of its start (`MIN_JUDGED`)."""
MIN_RAISE: Final = 1.25
"""A raise by less than a quarter is not worth an epoch: its gain is within the error of the
evidence. Following the prediction one by one took 8 changes from 47 to 74. By tenths it took six
instead of four, and went from 8 to 9, which is too many. Bursts with interference had 15 % smooth
at 8, 12 at 9."""
TOO_FAR_SHARE: Final = 0.4
"""A raise was too far if this share of the ticks with gaps since then exceeds the allowed share. A
cap breaks gaps evenly; interference breaks few ticks much. With a quarter, interference took a cap
of 2 back to 1 for minutes (75.4 % smooth instead of 76.1)."""
STANDING_TICKS: Final = 5
"""A queue for the cap that stands for ten seconds, or the first-token target, is more than a wave
being admitted. A breach takes three waves to show, as each is one sample."""
CLEAR_ROOM: Final = 1.5
"""A queue for the cap justifies a raise if the step model, with its whole margin, predicts half as
much again. Waiting until the queue stood made 8 of 123 requests late on a real worker: its cap was
12, predicted 32 for half a minute."""
STALLS_TO_LATE: Final = 0.5
"""A raise beyond the prediction may add at most this many gaps over target per late first token.
Each spoils a request for its reader, and a higher cap saves only some of the late."""
PROJECTED_SHARE: Final = 0.5
"""... and may fill this part of the allowed share. With all of it, every second answer of 48 tokens
has a stall. Bursts gain nothing from that (`cpu`, default targets: 12.6 % smooth at 9, 16.7 at
8)."""
LATE_MARGIN: Final = 0.97
"""The same for a prediction: half the share over is 2.58 deviations instead of 2.33. With noise of
5 to 10 %, that is 1 to 3 % of a step."""
LOWER: Final = 0.8
"""A lowering without a model, as in AIMD limiters: 0.8, not 0.5, since the knee is near."""
HALVE: Final = 0.5
"""If the model sees room for one sequence only, the cap goes there by halves, each on new evidence.
Otherwise a tail read in a noisy minute would stop all batching at once."""
REGIME_TICKS: Final = 15
"""Slowness that lasts 30 s is the pod's new speed: if interference lasts 5 s on average, one in 400
lasts longer. With 16 s, a long one took the cap to 1 in half an hour, and the queue of the next
minutes cost more. With 24 s the cap changed three times an hour."""
REGIME_WINDOW: Final = 18
"""... of this many newest ticks with traffic, some of which may have been clean."""
NO_GAP_MS: Final = 1e9
"""Longer than any gap: a week and more."""
INTERFERENCE_SHARE: Final = 0.5
"""Share of slow steps from which a tick counts as under interference."""
REMEMBER_S: Final = 600.0
"""A breached cap is not retried for this long, doubled at each repetition."""
MAX_DOUBLINGS: Final = 8
"""At most 42 hours: remembering longer than a day's pattern is of no use."""
SAME_CAP: Final = 0.9
"""A cap of at least this share of a breached one counts as breached: it would run as full."""
SHARED: Final = 0.2
"""Share of whole lengths that may be missing in computed ones before the prefix cache is the
reason: the two are from different minutes."""
LENGTHS_SHIFTED: Final = 0.2
"""If a mean length moved by more than this, what was learnt about a cap is void."""
LENGTHS_DOUBT: Final = 3.0
"""... and by this many of its standard errors more, as it is checked every two seconds. With means
of half a minute the cap went to a breached one, and back, every hour of steady bursts."""
STEPS_SHIFTED: Final = 0.3
"""A predicted tail that fell by more than this since a breach voids it: a noisy neighbour or a
throttled minute broke the target. Wider than for lengths, since a P99 is read here."""
REMEMBERED_CAPS: Final = 8
"""Breached caps kept in the ConfigMap; older ones have expired in practice."""

MIN_BUDGET: Final = 64
"""Least token budget of a step; smaller ones would double the steps of a prompt for little."""
CHUNK_SPARE: Final = 1.1
"""A budget for the load computes a tenth more than what arrives; 1.5 gave the same."""
CHUNK_DIFFERS: Final = 1.5
"""A new token budget restarts the pods: it must be half as much again, or two thirds. Budgets are
2**n and 3 * 2**n, so a fit that wavers between two neighbours of 1.33 changes nothing."""
CHUNK_TICKS: Final = 150
"""A token budget has settled once so many ticks with requests, five minutes, proposed alike, to
less than CHUNK_DIFFERS. The first model is of seconds, in which an engine may still compile."""
CHUNK_TICKS_MOST: Final = 1800
"""... and is taken after an hour of them, however they differ: the load may never be steady."""
CHUNK_KEPT_S: Final = 86_400.0
"""A token budget is replaced at most once a day."""

# Demand.
RATE_CHUNKS: Final = 5
"""The sustained arrival rate is the median of this many chunks. One burst cannot move it, and a
step of the load has moved it after three."""
MIN_CHUNK_S: Final = 6.0
"""Shortest chunk, three ticks: a step is seen within 18 s."""
MAX_CHUNK_S: Final = 120.0
"""Longest chunk: five of them are ten minutes."""
CHUNK_ARRIVALS: Final = 10.0
"""Arrivals that a chunk should hold, so that a low rate does not read as zero."""
RISING_TICKS: Final = 5
"""Ten seconds: if a queue rises over these ticks, their own median rate counts ..."""
RISES: Final = 4
"""... if it rose in four of them (a burst: in one): eight seconds before the median."""
RATE_DOUBT: Final = 2.05
"""Standard deviations: one-sided 95 % of a median, for the lower bound of a rate."""
BURST_MEMORY_S: Final = 600.0
"""Bursts are remembered for ten minutes."""
BURST_MEAN: Final = 3.0
"""A burst is a tick with more than this many times the mean arrivals ..."""
BURST_SIGMA: Final = 6.0
"""... and more than this many Poisson deviations above it: never by chance in a day of ticks."""
RECURRENT_BURSTS: Final = 3
"""So many bursts within the memory are a pattern to provide for, not an accident that a pod drains
by itself."""
DISPERSION_TICKS: Final = 150
"""Five minutes, from which the dispersion of the arrivals is read."""
DISPERSION_DOUBT: Final = 1.64
"""One-sided 95 %: the estimate from n differences has a relative deviation of sqrt(3 / n)."""
MAX_DISPERSION: Final = 4.0
"""Bound of variance over mean of the arrivals; beyond it the bursts themselves are provided for."""
MOST_REPLICAS: Final = 1000
"""No demand is computed beyond this: it bounds the search, and no single object has more pods."""
MAX_UTILISATION: Final = 0.95
"""Above this the queueing formula is a guess: plan replicas below it, also without a target."""
PREFILL_IDLE: Final = 0.25
"""Pods are enough for prefill if it is busy for no more than this. A target close to one prefill
would ask for dozens, which do not help a prompt that alone takes too long. With half of the prompts
too long, 1 pod became 10, for 48 % late instead of 50."""
PREFILL_IDLE_MARGIN: Final = 0.125
"""The same to scale in; with one number for both, replicas swing."""
SCALE_IN_UTILISATION: Final = 0.75
"""Utilisation that the pods left after a scale-in may reach at most. With 0.95 to scale out, the
band is so wide that noise of 10-20 % in the rate cannot cross it both ways."""
UNMODELLED: Final = 0.5
"""Part of that utilisation that is trusted without a step model: requests seen to be quick on
half-empty pods will be slower on full ones."""
SCALE_IN_MARGIN: Final = 0.25
"""Part of the allowed share that fewer replicas are predicted to put over target at most; the same
share counts as headroom."""
LEAST_RATE: Final = 0.005
"""Requests/s below which traffic counts as none."""
SETTLE_COLD_STARTS: Final = 2
"""Cold starts after which a requested pod that never came no longer blocks a scale-in."""
LOAD_ROSE: Final = 1.2
"""A second scale-out before the first has settled only if arrivals rose by more than this."""
OVERLOADED: Final = 1.1
"""More than this part of the pods' throughput at the cap must surely arrive before the gaps pay. At
1 a steady load of 95 % had caps of 10 to 15 where 8 is best (51 % smooth instead of 58)."""
STARVED_TICKS: Final = 45
"""... and requests must have waited for the cap in nearly every tick of a minute and a half. With
40 s, bursts with interference had 12.6 % smooth instead of 15.0. With five minutes, most first
tokens were late for as long on services that could not hold their gaps."""
LOAD_FELL: Final = 0.6
"""A cap raised for the load alone is given up early if less than this part of it arrives. Chance
moves the rate of a hundred arrivals in ten minutes by a tenth; a new pod halves it."""
YOUNG_S: Final = 120.0
"""A pod this young may still owe its misses to its start: two default cold starts."""
DEFAULT_COLD_START_S: Final = 60.0
"""Until one was measured: pulling nothing, loading and profiling a small model."""
MAX_DRAIN_S: Final = 600.0
"""A predicted drain is not waited for longer than this: the prediction is then worth nothing."""
MIN_SERVICE_S: Final = 0.001
"""No request takes less: keeps a fit of zeros from promising an infinite capacity."""
HISTORY: Final = 5
"""Changes of the replicas kept for status."""
GROWING_QUEUE_S: Final = 20.0
"""A queue that grew over this span while every pod was full needs a pod, whatever the model
says."""
MIN_FINISHED: Final = 5
"""Finished requests per pod before their mean output is believed: the first to finish are short. If
the last half minute holds fewer, older ticks count as well."""
