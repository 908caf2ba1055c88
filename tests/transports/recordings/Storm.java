import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.netty.NettyChannelBuilder;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/** A storm by grpc-java's client: Storm HOST:PORT deadlines|cancels|reconnects COUNT. */
public final class Storm {
    private static final class Bytes implements MethodDescriptor.Marshaller<byte[]> {
        @Override
        public InputStream stream(byte[] value) {
            return new ByteArrayInputStream(value);
        }

        @Override
        public byte[] parse(InputStream stream) {
            try {
                ByteArrayOutputStream out = new ByteArrayOutputStream();
                stream.transferTo(out);
                return out.toByteArray();
            } catch (IOException error) {
                throw new IllegalStateException(error);
            }
        }
    }

    private static MethodDescriptor<byte[], byte[]> method(String name) {
        return MethodDescriptor.newBuilder(new Bytes(), new Bytes())
            .setType(MethodDescriptor.MethodType.UNARY)
            .setFullMethodName("t.T/" + name)
            .build();
    }

    private static ClientCall<byte[], byte[]> call(
            ManagedChannel channel, String name, CallOptions options, CountDownLatch done, List<Status> ends) {
        ClientCall<byte[], byte[]> call = channel.newCall(method(name), options);
        call.start(new ClientCall.Listener<byte[]>() {
            @Override
            public void onClose(Status status, Metadata trailers) {
                synchronized (ends) {
                    ends.add(status);
                }
                done.countDown();
            }
        }, new Metadata());
        call.request(2);
        call.sendMessage("an ordinary request".getBytes());
        call.halfClose();
        return call;
    }

    private static void echo(ManagedChannel channel) throws Exception {
        CountDownLatch done = new CountDownLatch(1);
        List<Status> ends = new ArrayList<>();
        call(channel, "Echo", CallOptions.DEFAULT, done, ends);
        done.await();
        if (!ends.get(0).isOk()) {
            throw new IllegalStateException(ends.get(0).toString());
        }
    }

    public static void main(String[] words) throws Exception {
        String how = words[1];
        int count = Integer.parseInt(words[2]);
        int rounds = how.equals("reconnects") ? 2 : 1;
        for (int round = 0; round < rounds; round++) {
            ManagedChannel channel = NettyChannelBuilder.forTarget(words[0]).usePlaintext().build();
            echo(channel);
            CallOptions options = CallOptions.DEFAULT;
            if (how.equals("deadlines")) {
                options = options.withDeadlineAfter(1, TimeUnit.SECONDS);
            }
            CountDownLatch done = new CountDownLatch(count);
            List<Status> ends = new ArrayList<>();
            List<ClientCall<byte[], byte[]>> calls = new ArrayList<>();
            for (int number = 0; number < count; number++) {
                calls.add(call(channel, "Held", options, done, ends));
            }
            if (!how.equals("deadlines")) {
                Thread.sleep(500);
            }
            if (how.equals("reconnects")) {
                channel.shutdownNow().awaitTermination(10, TimeUnit.SECONDS);
                continue;
            }
            if (how.equals("cancels")) {
                for (ClientCall<byte[], byte[]> call : calls) {
                    call.cancel("cancelled", null);
                }
            }
            done.await();
            echo(channel);
            channel.shutdownNow().awaitTermination(10, TimeUnit.SECONDS);
        }
        System.exit(0);
    }
}
