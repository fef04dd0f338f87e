from __future__ import annotations
import sys, threading, time, collections, traceback, os
import pytest
from tests.integration.test_large import *
pytestmark = pytest.mark.server

async def test_probe(world):
    n = int(os.environ.get("LAYERS", "6"))
    handlers = counters()
    await start(world, handlers)
    stop = threading.Event()
    leaf, incl = collections.Counter(), collections.Counter()
    names = {}
    me = None
    def sample():
        while not stop.wait(0.005):
            for tid, frame in sys._current_frames().items():
                if tid == me_id[0]: continue
                stack = traceback.extract_stack(frame) if False else None
                f = frame; seen=set(); first=True; top=[]
                while f:
                    key = f"{f.f_code.co_filename.split('/site-packages/')[-1].split('/python3.11/')[-1]}:{f.f_code.co_name}"
                    if first: leafkey = key; first=False
                    if key not in seen: seen.add(key); top.append(key)
                    f = f.f_back
                if 'selectors.py:select' in leafkey or 'threading.py:wait' in leafkey or 'thread.py:_worker' in leafkey: 
                    continue
                leaf[leafkey]+=1
                for k in top: incl[k]+=1
    me_id=[None]
    t = threading.Thread(target=lambda: (me_id.__setitem__(0, threading.get_ident()), sample()))
    t.start()
    nodes = layers(n)
    begun = time.monotonic(); c0=time.process_time()
    task_id = await world.create(*nodes)
    await world.result(task_id)
    el = time.monotonic()-begun
    print("TOTAL", len(nodes), el, 1000*el/len(nodes), "cpu ms/node", 1000*(time.process_time()-c0)/len(nodes))
    stop.set(); t.join()
    print("LEAF"); 
    for k,v in leaf.most_common(25): print(v,k)
    print("INCL")
    for k,v in incl.most_common(70): print(v,k)
